// LaTeX as models and data sets write it -> MathML. It makes elements and text nodes and nothing else: no markup is
// parsed and nothing of a text is run. What it cannot read stays as it was written.

const MATHML = "http://www.w3.org/1998/Math/MathML";
const LONGEST_FORMULA = 2000, DEEPEST = 40, MOST_NODES = 4000;

const OPERATORS = {
  times: "×", cdot: "⋅", div: "÷", pm: "±", mp: "∓", ast: "∗", star: "⋆", circ: "∘", bullet: "•", odot: "⊙", oplus: "⊕", otimes: "⊗",
  le: "≤", leq: "≤", leqslant: "≤", ge: "≥", geq: "≥", geqslant: "≥", ne: "≠", neq: "≠", lt: "<", gt: ">", ll: "≪", gg: "≫",
  approx: "≈", equiv: "≡", sim: "∼", simeq: "≃", cong: "≅", propto: "∝", colon: ":",
  to: "→", rightarrow: "→", longrightarrow: "⟶", Rightarrow: "⇒", implies: "⟹", Longrightarrow: "⟹", leftarrow: "←", Leftarrow: "⇐",
  leftrightarrow: "↔", Leftrightarrow: "⇔", iff: "⟺", Longleftrightarrow: "⟺", mapsto: "↦", uparrow: "↑", downarrow: "↓",
  in: "∈", notin: "∉", ni: "∋", subset: "⊂", subseteq: "⊆", supset: "⊃", supseteq: "⊇", cup: "∪", cap: "∩", setminus: "∖",
  forall: "∀", exists: "∃", neg: "¬", lnot: "¬", land: "∧", wedge: "∧", lor: "∨", vee: "∨", therefore: "∴", because: "∵",
  mid: "∣", nmid: "∤", parallel: "∥", perp: "⊥", angle: "∠", triangle: "△", square: "□", Box: "□", blacksquare: "■", checkmark: "✓",
  bigtriangleup: "△", bigcirc: "◯", Diamond: "◊", clubsuit: "♣", diamondsuit: "♢", heartsuit: "♡", spadesuit: "♠",
  ldots: "…", dots: "…", dotsc: "…", cdots: "⋯", dotsb: "⋯", dotsm: "⋯", vdots: "⋮", ddots: "⋱", prime: "′", degree: "°",
  sum: "∑", prod: "∏", int: "∫", iint: "∬", oint: "∮", bigcup: "⋃", bigcap: "⋂", nabla: "∇",
  lfloor: "⌊", rfloor: "⌋", lceil: "⌈", rceil: "⌉", langle: "⟨", rangle: "⟩", lbrace: "{", rbrace: "}", lvert: "|", rvert: "|",
  vert: "|", lVert: "‖", rVert: "‖", Vert: "‖", lbrack: "[", rbrack: "]", backslash: "\\",
  "{": "{", "}": "}", "|": "‖", "%": "%", "$": "$", "#": "#", "&": "&", _: "_",
};
const LETTERS = {
  alpha: "α", beta: "β", gamma: "γ", delta: "δ", epsilon: "ϵ", varepsilon: "ε", zeta: "ζ", eta: "η", theta: "θ",
  vartheta: "ϑ", iota: "ι", kappa: "κ", lambda: "λ", mu: "μ", nu: "ν", xi: "ξ", pi: "π", rho: "ρ", sigma: "σ", tau: "τ",
  upsilon: "υ", phi: "ϕ", varphi: "φ", chi: "χ", psi: "ψ", omega: "ω", Gamma: "Γ", Delta: "Δ", Theta: "Θ", Lambda: "Λ",
  Xi: "Ξ", Pi: "Π", Sigma: "Σ", Phi: "Φ", Psi: "Ψ", Omega: "Ω", infty: "∞", emptyset: "∅", varnothing: "∅", partial: "∂",
  ell: "ℓ", hbar: "ℏ", Re: "ℜ", Im: "ℑ",
};
const NAMED = "sin cos tan sec csc cot arcsin arccos arctan sinh cosh tanh log ln lg exp deg dim ker arg lcm bmod mod".split(" ");
const NAMED_LIMITS = "lim max min sup inf gcd det Pr limsup liminf".split(" ");
const LIMITS = ["∑", "∏", "⋃", "⋂"];
const SPACES = { ",": ".17em", ":": ".22em", ";": ".28em", " ": ".28em", "\n": ".28em", "!": "0", quad: "1em", qquad: "2em", "\\": "1em" };
const LINES = ["overline", "bar", "underline", "boxed", "fbox"];  // drawn as borders, which need no mathematical font
const ACCENTS = { hat: "^", widehat: "^", tilde: "~", widetilde: "~", vec: "→", overrightarrow: "→", dot: "˙", ddot: "¨" };
const FENCES = { pmatrix: "()", bmatrix: "[]", Bmatrix: "{}", vmatrix: "||", Vmatrix: "‖‖", cases: ["{", ""] };
const TABLES = ["matrix", "smallmatrix", "array", "aligned", "align", "alignedat", "gathered", "gather", "split", "equation", "eqnarray", ...Object.keys(FENCES)];
const AS_TEXT = ["text", "textbf", "textit", "textrm", "texttt", "textsf", "textnormal", "emph", "mbox", "hbox", "tag"];
const UPRIGHT = ["mathrm", "operatorname", "mathsf", "mathtt"];
const AS_IS = ["mathbf", "bold", "mathop", "mathit", "mathcal", "mathfrak", "boldsymbol", "pmb", "cancel", "ensuremath", "underbrace", "overbrace"];
const NOTHING = "displaystyle textstyle scriptstyle limits nolimits nonumber notag hline hfill centering bf rm it".split(" ");
const BIGGER = /^(big|Big|bigg|Bigg)[lrm]?$/;
const DOUBLE_STRUCK = { C: "ℂ", H: "ℍ", N: "ℕ", P: "ℙ", Q: "ℚ", R: "ℝ", Z: "ℤ" };
const TOKEN = /\\[a-zA-Z]+|\\[\s\S]|\d+(?:,\d{3}(?!\d))*(?:\.\d+)?|[\s\S]/uy;

class Formula {
  constructor(source) {
    this.source = source;
    this.at = this.depth = this.made = 0;
    this.next();
  }

  // Moves on to the next token that is no space; "" at the end. `start` is where it begins.
  next() {
    const passed = this.token;
    while (/\s/.test(this.source[this.at] ?? "")) this.at++;
    this.start = TOKEN.lastIndex = this.at;
    this.token = TOKEN.exec(this.source)?.[0] ?? "";
    this.at += this.token.length;
    return passed;
  }

  make(tag, ...inside) {
    if (++this.made > MOST_NODES) throw new Error("too large");
    const node = document.createElementNS(MATHML, tag);
    node.append(...inside);
    return node;
  }

  operator(text, attributes = {}) {
    const node = this.make("mo", text);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    return node;
  }

  whole() {
    const lines = [this.row()];
    while (this.token === "\\\\") this.next(), lines.push(this.row());
    if (this.token) throw new Error(`${this.token} without its beginning`);
    return lines.length === 1 ? lines[0] : this.table(lines.map((line) => [this.make("mtd", line)]), "cases");
  }

  // Nodes up to a token that ends a row, which is left to the caller.
  row() {
    const nodes = [];
    while (!["", "}", "&", "\\\\", "\\cr", "\\right", "\\end"].includes(this.token)) {
      if (!["\\over", "\\choose"].includes(this.token)) nodes.push(this.scripted());
      else return this.fraction(this.next() === "\\choose", this.make("mrow", ...nodes), this.row());
    }
    return nodes.length === 1 ? nodes[0] : this.make("mrow", ...nodes);
  }

  expect(token) {
    if (this.next() !== token) throw new Error(`no ${token}`);
  }

  // What a command takes: a group in braces, or one atom; of a number its first digit, as LaTeX has it.
  argument() {
    if (!this.token) throw new Error("an argument is missing");
    if (/^\d./.test(this.token)) {
      this.at = this.start + 1;
      this.token = this.source[this.start];
    }
    return this.atom();
  }

  // A group as it is written, or one token.
  words() {
    if (this.token !== "{") return this.next();
    const from = this.at;
    for (let depth = 1, i = from; i < this.source.length; i++) {
      if (this.source[i] === "\\") i++;
      else if (this.source[i] === "{") depth++;
      else if (this.source[i] === "}" && !--depth) {
        this.at = i + 1;
        this.next();
        return this.source.slice(from, i);
      }
    }
    throw new Error("no }");
  }

  scripted() {
    const base = ["^", "_"].includes(this.token) ? this.make("mrow") : this.atom();
    let below, above;
    while (["^", "_", "'"].includes(this.token)) {
      if (this.token === "'") {
        let primes = "";
        while (this.token === "'") primes += this.next() && "′";
        above = above ? this.make("mrow", above, this.operator(primes)) : this.operator(primes);
      } else if (this.next() === "^") above = this.argument();
      else below = this.argument();
    }
    if (!below && !above) return base;
    const limits = LIMITS.includes(base.textContent) || base.limits;
    if (below && above) return this.make(limits ? "munderover" : "msubsup", base, below, above);
    return below ? this.make(limits ? "munder" : "msub", base, below) : this.make(limits ? "mover" : "msup", base, above);
  }

  atom() {
    if (++this.depth > DEEPEST) throw new Error("too deep");
    const node = this.one();
    this.depth--;
    return node;
  }

  one() {
    const token = this.next();
    if (token === "{") {
      const inside = this.row();
      this.expect("}");
      return inside;
    }
    if (token.startsWith("\\")) return this.command(token.slice(1));
    if (/^\d/.test(token)) return this.make("mn", token);
    if (token === "~") return this.make("mtext", "\u00a0");
    if (/^\p{L}/u.test(token)) return this.make("mi", token);
    if ("()[]|".includes(token)) return this.operator(token, { stretchy: "false" });
    return this.operator(token === "-" ? "−" : token);
  }

  command(name) {
    const known = (table) => Object.hasOwn(table, name);
    if (/^[dtc]?frac$/.test(name)) return this.fraction(false, this.argument(), this.argument());
    if (/^[dt]?binom$/.test(name)) return this.fraction(true, this.argument(), this.argument());
    if (name === "sqrt") return this.root();
    if (LINES.includes(name)) {
      const box = this.make("mrow", this.argument());
      box.setAttribute("class", name);
      return box;
    }
    if (AS_TEXT.includes(name)) return this.make("mtext", this.words().replaceAll(" ", "\u00a0"));
    if (UPRIGHT.includes(name)) return this.upright(this.words());
    if (name === "mathbb") {
      const letter = this.words();
      return this.upright(Object.hasOwn(DOUBLE_STRUCK, letter) ? DOUBLE_STRUCK[letter] : letter);
    }
    if (AS_IS.includes(name)) return this.argument();
    if (NOTHING.includes(name)) return this.make("mrow");
    if (["hspace", "vspace", "label", "color", "phantom"].includes(name)) return this.words(), this.make("mrow");
    if (name === "textcolor") return this.words(), this.argument();
    if (known(SPACES)) {
      const space = this.make("mspace");
      space.setAttribute("width", SPACES[name]);
      return space;
    }
    if (known(ACCENTS)) {
      const over = this.make("mover", this.argument(), this.operator(ACCENTS[name]));
      over.setAttribute("accent", "true");
      return over;
    }
    if (["overset", "stackrel", "underset"].includes(name)) {
      const script = this.argument(), base = this.argument();
      return this.make(name === "underset" ? "munder" : "mover", base, script);
    }
    if (name === "not") return this.operator(this.atom().textContent + "\u0338");
    if (name === "pmod") return this.make("mrow", this.make("mtext", "\u00a0(mod\u00a0"), this.argument(), this.make("mtext", ")"));
    if (BIGGER.test(name)) return this.delimiter();
    if (name === "left") return this.fenced();
    if (name === "begin") return this.environment();
    if (NAMED.includes(name)) return this.upright(name);
    if (NAMED_LIMITS.includes(name)) return Object.assign(this.upright(name), { limits: true });
    if (known(LETTERS)) return this.make("mi", LETTERS[name]);
    if (known(OPERATORS)) return this.operator(OPERATORS[name]);
    return this.make("mtext", `\\${name}`);
  }

  fraction(binomial, above, below) {
    const two = this.make("mfrac", above, below);
    if (!binomial) return two;
    two.setAttribute("linethickness", "0");
    return this.make("mrow", this.operator("("), two, this.operator(")"));
  }

  upright(text) {
    const node = this.make("mi", text.replaceAll(" ", "\u00a0"));
    node.setAttribute("mathvariant", "normal");
    return node;
  }

  root() {
    if (this.token !== "[") return this.make("msqrt", this.argument());
    const from = this.at, to = this.source.indexOf("]", from);
    if (to < 0) throw new Error("no ]");
    this.at = to + 1;
    this.next();
    return this.make("mroot", this.argument(), this.make("mn", this.source.slice(from, to)));
  }

  delimiter(attributes = { stretchy: "true" }) {
    const token = this.next(), name = token.slice(1);
    if (!token) throw new Error("no delimiter");
    if (token === ".") return this.make("mrow");
    return this.operator(token.startsWith("\\") && Object.hasOwn(OPERATORS, name) ? OPERATORS[name] : token, attributes);
  }

  fenced() {
    const parts = [this.delimiter({ stretchy: "true", form: "prefix" }), this.row()];
    this.expect("\\right");
    return this.make("mrow", ...parts, this.delimiter({ stretchy: "true", form: "postfix" }));
  }

  table(rows, kind) {
    const table = this.make("mtable", ...rows.map((cells) => this.make("mtr", ...cells)));
    table.setAttribute("class", kind);
    return table;
  }

  newLine(rows) {
    this.next();
    if (this.token === "[") while (this.token && this.next() !== "]");  // the space that may follow: \\[1ex]
    if (this.token !== "\\end") rows.push([]);
  }

  environment() {
    const name = this.words(), plain = name.replace("*", "");
    if (!TABLES.includes(plain)) throw new Error(`${name} is not known`);
    if (plain === "array" || plain === "alignedat") this.words();
    const rows = [[]];
    for (;;) {
      rows.at(-1).push(this.make("mtd", this.row()));
      if (this.token === "&") this.next();
      else if (["\\\\", "\\cr"].includes(this.token)) this.newLine(rows);
      else break;
    }
    this.expect("\\end");
    if (this.words() !== name) throw new Error(`another end than ${name}'s`);
    const table = this.table(rows, plain === "cases" ? plain : /^(align|split|eqn)/.test(plain) ? "aligned" : "matrix");
    const [open, close] = FENCES[plain] ?? ["", ""];
    const fence = (text, form) => (text ? [this.operator(text, { stretchy: "true", form })] : []);
    return this.make("mrow", ...fence(open, "prefix"), table, ...fence(close, "postfix"));
  }
}

const OPENERS = /\\\(|\\\[|\$\$|\$|\\boxed\s*(?=\{)|\\begin\{(\w+\*?)\}/g;
const MOST_FORMULAS = 200;

// Is what stands between two dollars prose about money, as in "$5 a day and $", and no formula?
function isMoney(text) {
  const bare = text.replace(/\\(?:text\w*|mbox|mathrm|operatorname)\s*\{[^}]*\}|\\[a-zA-Z]+/g, "0");
  if (/\n\s*\n|<<|[a-z]{2,}\s+[a-z]|\d\s+[a-z]{3,}|[=+*/(-]\s*$|^\s*[.,]\s*\D/.test(bare)) return true;
  return /^\s|\s$/.test(text) && !/[\\^_{}]|^\s*[a-zA-Z]+\s*$|^\s*[^\s\d].*=/.test(text);
}

// Where the formula that begins at `start` ends, as [end of its source, source]; null where it is none.
function formula(text, start, opener, environment) {
  const inside = start + opener.length, window = text.slice(inside, inside + LONGEST_FORMULA);
  const upTo = (closer) => {
    const end = window.indexOf(closer);
    return end < 0 ? null : [inside + end + closer.length, window.slice(0, end)];
  };
  if (environment) {
    if (!TABLES.includes(environment.replace("*", ""))) return null;
    const closer = `\\end{${environment}}`, found = upTo(closer);
    return found && [found[0], opener + found[1] + closer];
  }
  if (opener === "\\(") return upTo("\\)");
  if (opener === "\\[") return upTo("\\]");
  if (opener === "$$") return upTo("$$");
  if (opener === "$") {
    const found = window.match(/^((?:\\[\s\S]|[^\\$])+?)\$(?!\d)/);
    return found && !isMoney(found[1]) ? [inside + found[0].length, found[1]] : null;
  }
  let depth = 0;
  for (let i = 0; i < window.length; i++) {
    if (window[i] === "\\") i++;
    else if (window[i] === "{") depth++;
    else if (window[i] === "}" && !--depth) return [inside + i + 1, opener + window.slice(0, i + 1)];
  }
  return null;
}

// Appends `text` to `box`, with its formulas as MathML.
function typeset(text, box) {
  let done = 0, count = 0;
  OPENERS.lastIndex = 0;
  for (let found; count < MOST_FORMULAS && (found = OPENERS.exec(text)); ) {
    const [opener, environment] = found;
    const ends = formula(text, found.index, opener, environment);
    if (!ends) continue;
    const [end, source] = ends;
    try {
      const parsed = new Formula(source), math = parsed.make("math", parsed.whole());
      if (["\\[", "$$"].includes(opener) || environment) math.setAttribute("display", "block");
      box.append(text.slice(done, found.index), math);
      done = end;
      count++;
    } catch {
      // It stays as it was written.
    }
    OPENERS.lastIndex = end;
  }
  box.append(text.slice(done));
}

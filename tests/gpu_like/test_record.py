"""What a simulated run's record says of its peaks, on records whose answer can be worked out on paper."""

from __future__ import annotations

from gpu_like.simulation.allocator import MB
from gpu_like.simulation.record import Record, Storage


def record() -> Record:
    """Weights of 100 MB and something that loading threw away; a cache of 60 MB while generating, 30 MB kept by a
    forward pass, and 40 MB of a backward pass beside it."""

    def storage(size: int, phase: str, line: str = "", kind: str = "") -> Storage:
        return Storage(size * MB, phase, line, (size,), "uint8", kind=kind)

    made = Record()
    made.storages = [
        storage(50, "loading"),
        storage(100, "loading", kind="weights"),
        storage(60, "generation", "grpo_math/generation/decoding.py:200 _with_room"),
        storage(30, "forward", "transformers/models/qwen2/modeling_qwen2.py:46 forward"),
        storage(40, "backward", "MmBackward0 of transformers/models/qwen2/modeling_qwen2.py:46 forward"),
    ]
    made.events = [1, 2, -1, 3, -3, 4, 5, -5, -4]
    made.phases = [(0, "loading"), (3, "generation"), (5, "forward"), (6, "backward"), (9, "optimizer")]
    return made


def test_the_peak_of_each_phase_is_what_is_live_at_once_and_loading_leaves_only_what_it_keeps():
    peaks, existing = record().live()
    in_mb = {"loading": 100, "generation": 160, "forward": 130, "backward": 170}
    assert {phase: size // MB for phase, size in peaks.items()} == in_mb
    assert [storage.size // MB for storage in existing] == [100, 30, 40]


def test_what_is_reserved_is_reused_and_never_falls():
    reserved = record().reserved()
    assert {phase: size // MB for phase, size in reserved.items()} == {
        "loading": 100,
        "generation": 160,
        "forward": 160,
        "backward": 200,  # the 30 MB lie in the block of 60, whose rest is too small
    }
    assert max(record().reserved(training=True).values()) == 170 * MB


def test_the_answer_names_the_kinds_and_the_largest_tensors_at_the_peak():
    answer = record().answer()
    kinds = {kind: size // MB for kind, size in answer["kinds"].items()}
    assert kinds == {"weights": 100, "gradients of activations": 40, "activations": 30}
    assert [tensor["bytes"] // MB for tensor in answer["largest"]] == [100, 40, 30]
    assert answer["largest"][1]["line"].startswith("MmBackward0 of transformers")
    assert (answer["live"], answer["peak_phase"]) == (170 * MB, "backward")
    assert answer["training"] == {"live": 170 * MB, "reserved": 170 * MB, "kinds": answer["kinds"]}

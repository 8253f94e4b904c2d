r"""Parts of patterns for choices, numbers and money, without groups, from which other modules make patterns.

>>> import re
>>> [re.fullmatch(part, text) is not None for part, text in ((CHOICE, "J"), (GROUPED, "1,200"), (DECIMAL, "1.5"))]
[True, True, True]
"""

# The letter of an option, perhaps in brackets, and a circled number.
CHOICE = "[A-J]"
BRACKETED = rf"\(?{CHOICE}\)?"
CIRCLED = "①-⑳"  # in brackets of a pattern
# 1,200 and 1.5, without a sign.
GROUPED = r"\d{1,3}(?:,\d{3})+"
DECIMAL = r"\d+(?:\.\d+)?"
# Signs of money, in brackets of a pattern, and codes.
CURRENCIES = "$¢-¥֏؋߾߿৲৳৻૱௹฿៛₠-₿꠸﷼﹩＄￠￡￥￦"
CODES = (
    "USD|EUR|GBP|JPY|CNY|RMB|KRW|INR|BRL|PLN|CZK|HUF|SEK|NOK|DKK|CHF|RUB|UAH|TRY|MXN|ARS|CLP|COP|PEN|THB|VND|IDR|MYR|PHP"
    "|SGD|HKD|TWD|ZAR|NGN|KES|EGP|ILS|AED|SAR|AUD|CAD|NZD|RON|BGN|KZT"
)

"""What a marked place says its number is: hand-read texts, and what a word or a sign beside a number does to it."""

from __future__ import annotations

import re
from fractions import Fraction

import pytest

from rlmegatron.rewards.numeric import find_number
from rlmegatron.rewards.read_number import Number, is_prose, last_number, only_number, sentence_number

ACCEPTED = {
    # as GSM8K and MATH write their answers
    "18": 18,
    "-18": -18,
    "+18": 18,
    "007": 7,
    "18.": 18,
    "70,000": 70_000,
    "$70,000.50": Fraction(140_001, 2),
    r"70{,}000": 70_000,
    r"70\,000": 70_000,
    r"10,\!080": 10_080,
    "1\u00a0234\u202f567": 1_234_567,
    r"\$1,\!234": 1234,
    "0.5": Fraction(1, 2),
    ".5": Fraction(1, 2),
    r"\frac{3}{4}": Fraction(3, 4),
    r"-\dfrac{3}{4}": Fraction(-3, 4),
    r"\frac34": Fraction(3, 4),
    r"\left(\frac{3}{4}\right)": Fraction(3, 4),
    r"1\frac{3}{4}": Fraction(7, 4),
    r"1\,\frac{3}{4}": Fraction(7, 4),
    "1 3/4": Fraction(7, 4),
    "3/4": Fraction(3, 4),
    "3\u20444": Fraction(3, 4),
    "1.5e3": 1500,
    r"2.5 \times 10^{-3}": Fraction(1, 400),
    r"10^{4}": 10_000,
    r"\text{$46$}": 46,
    r"{18}": 18,
    r"\(18\)": 18,
    r"\[18\]": 18,
    r"\boxed{18}": 18,
    r"\textbf{\text{18}}": 18,
    r"\mathbf{18}": 18,
    r"\displaystyle 18": 18,
    r"18\\": 18,
    r"18\n": 18,
    r"\therefore 18": 18,
    "<answer>18</answer><|im_end|>": 18,
    # signs, dashes and blanks
    "\u221218": -18,
    "\u201318": -18,
    "\uff0d18": -18,
    "- 18": -18,
    "Answer: - 18": -18,
    "(- 18)": -18,
    "-$18": -18,
    "$-18": -18,
    "-£18": -18,
    r"-\pounds 18": -18,
    "Answer - 18": 18,
    "Answer\u201418": 18,
    "18 \u2014 that is all": 18,
    "18 --- that is all": 18,
    "18 -": 18,
    "18\u00a0dollars": 18,
    "\u200b18\u3000eggs\ufeff": 18,
    r"18\ \quad\;eggs": 18,
    "18~eggs": 18,
    # punctuation, quotations, markdown and pictograms
    "**18**": 18,
    "*18* eggs": 18,
    "**Answer:**18": 18,
    "`18`": 18,
    '"18"': 18,
    "\u201c18\u201d, \u00ab so \u00bb; 'yes'": 18,
    "18?": 18,
    "18 eggs!": 18,
    "(18)": 18,
    "18 (eighteen)": 18,
    "18 apple(s)": 18,
    "18...": 18,
    "So\u2026 18": 18,
    "\u7b54\u6848\uff1a18\u3002": 18,
    "18 \u2705": 18,
    "(B) 18": 18,
    r"\textbf{(E)}\ 18": 18,
    "18,": 18,
    # currencies, percentages, degrees
    "18 €": 18,
    "18¢": 18,
    "₹18": 18,
    "USD 18": 18,
    r"50\%": Fraction(1, 2),
    "50\uff05": Fraction(1, 2),
    "50 percent": Fraction(1, 2),
    r"50\text{ per cent of it}": Fraction(1, 2),
    r"\frac{1}{2} percent": Fraction(1, 200),
    r"90^\circ": 90,
    r"90^{\circ}\text{C}": 90,
    r"90\degree": 90,
    "90°F": 90,
    # units
    r"60\,\text{cm}^2": 60,
    r"60 \mathrm{~cm}^{2}": 60,
    r"9.8\,\mathrm{m/s^{-2}}": Fraction(49, 5),
    r"60\mbox{ cm}^3": 60,
    "60 cm²": 60,
    r"60\operatorname{cm}": 60,
    "60 km/h": 60,
    "$18/day": 18,
    r"\$18/\text{hour}": 18,
    r"18 \frac{\text{miles}}{\text{hour}}": 18,
    r"5\text{ N} \cdot \text{m}": 5,
    "5 N·m": 5,
    "5 kg": 5,
    "5kg": 5,
    "5KG": 5,
    "5kW": 5,
    "18GB": 18,
    "5 V": 5,
    "5m": 5,
    "5 Ω": 5,
    "5 \u03bcm": 5,
    "5 K": 5,
    "5th": 5,
    r"5^{th} place": 5,
    r"5^\text{th}": 5,
    "5 PM": 5,
    "5pm": 5,
    "5 p.m.": 5,
    "5 U.S. dollars": 5,
    "18dollars": 18,
    "18\u5143": 18,
    "18 \u043b\u0435\u0442": 18,
    # words
    "It is 18": 18,
    "He has 18 apples": 18,
    "A total of 18": 18,
    "I get 18": 18,
    "18 hours a day": 18,
    r"\text{It takes }18\text{ days}": 18,
    r"\text{It takes}18": 18,
    "Tom's age is 18": 18,
    "I'd say 18": 18,
    "They don't need 18": 18,
    "18-year-old": 18,
    r"18\text{-inch}": 18,
    "18 T-shirts": 18,
    "-18 is negative": -18,
    "18 times": 18,
    "18 meters squared": 18,
    "we do not have 18": 18,
    # what it is called and how it was found
    "x = 18": 18,
    r"x \approx 3.14": Fraction(157, 50),
    "x ≈ 3": 3,
    "x_{10} = 18": 18,
    "f(3) = 18": 18,
    r"\angle ABC = 18^\circ": 18,
    "Therefore, x = 18": 18,
    "= 18": 18,
    "9 x 2 = 18": 18,
    "9x2 = 18": 18,
    "1,000 - 982 = 18": 18,
    r"\frac{36}{2} = 18": 18,
    r"\sqrt{324} = 18": 18,
    "2^3 + 7 = 15": 15,
    "4! = 24": 24,
    "x = 12 + 6 = 18": 18,
    "x = y = 18": 18,
    r"\frac{1}{2} = 0.5": Fraction(1, 2),
    "Total: 9 * $2 = $18 every day": 18,
    "So, Janet makes 9 * 2 = $18": 18,
    "A sum of 9 + 9 = 18": 18,
    r"12 \text{ apples} + 6 \text{ apples} = 18 \text{ apples}": 18,
    r"{\bf 18}": 18,
    r"18\,{\rm cm}": 18,
    "1\uff0c234": 1234,
    r"\tfrac{3}{4}": Fraction(3, 4),
    "18 \u2714\ufe0f": 18,
    "18eggs": 18,
    "The percent is 5": 5,
    "5 percentage points": 5,
    "18 (that is, eighteen)": 18,
    "x_1 = 18": 18,
    r"\$2 \times 9 = 18": 18,
    r"2 \cdot 9 = 18": 18,
    r"36 \div 2 = 18": 18,
    r"\binom{18}{1} = 18": 18,
    "x = 12 eggs + 6 eggs = 18 eggs": 18,
}

REFUSED = r"""
2516_8 | 1_8 | 2516_{\text{eight}} | 2\sqrt{3} | \sqrt{3} | \frac{5\pi}{6} | 2π | 2 πr | \pi/6 | 10^10^10
1e999999999 | 10^x | x^2+1 | 3x+2 | 2+3i | 3 i | 5! | 5 ! | (5)! | \text{5!} | 10⁴ | 5² | 3½ | |5| | ±5 | \pm 5
-(5) | - (5) | --5 | x/5 | total/5 | 5+ | 5 × | *5 | 5 & x | 0.\overline{3} | 0.333... | 0.333… | ,5 | so,5
No.5 | ...5 | 10^{4}5 6 | none | (3,4) | (3,400) | [1,2) | [5] | \{5\} | 1, 2 | 1,2 | 1,\,200 | 1\,2 | 1 200
12 34 | 1,23,456 | 5:30 | 3 to 4 | 18 - 2 | 1 < x < 3 | x > 5 | > 5 | \geq 5 | x \neq 5 | x != 5 | x^2 = 4
2x = 10 | 2 x = 10 | x 2 = 10 | x + y = 10 | -x = 5 | x = 3, y = 4 | x = 1, total = 4 | apples = 3, pears = 4
x, y = 5 | x(2 = 10 | sin 2x = 1 | 5 = x | 12a | 12 a | 12 a^2 | 12 I | 3\text{x} | 3 k | 5k | 5K | 5M | 3 xy
3xy | 3abc | 5 x-y | 5-x | a5 | x5 | m5 | x 5 | m 5 | F(5) | sum(5) | 3θ | 3 θ | 3𝑥 | 3 𝑥 | \frac{x}{y} 5
minus 5 | \text{negative }5 | Negative 5 | not 5 | all reals except 5 | more than 5 | two times 5 | twice 5
double 5 | triple 5 | 5 squared | 5 \text{ cubed} | 5 choose two | 5-million | 5万元 | 5 亿 | 5 萬 | 5 億 | 负5 | 負 5
x \approxeq 5 | 5x.y | 5 p.million | total \cdot 5 | \neg 5 | 10^{4}5 | 3pqr | 2pq = 10 | a + 5 = 10 | pq^2 = 5
1 + ab(2 = 5 | 50 %% of
"""
FONTS = "text textbf mathrm mbox hbox fbox boxed emph underline operatorname boldsymbol bf rm"
CHANGING = """
pi root sqrt log ln sin cos tan exp mod modulo base factorial infinity infinite inf minus plus hundred
hundreds thousand thousands million millions billion billions trillion mln bn dozen dozens half halves thirds
fourths fifths eighths tenths hundredths thousandths xy yz xz xyz ab abc
"""
GLUED = """
th st nd rd am pm mm cm dm km nm um in ft yd yds mi ha cc ml dl cl gal qt pt oz lb lbs mg kg tsp tbsp px ms
sec secs min mins hr hrs yr yrs mph kph kw mw kwh gb mb tb kb hz khz mhz ghz kj ev pa kpa db mol usd eur
"""


@pytest.mark.parametrize(("text", "value"), ACCEPTED.items())
def test_what_leaves_a_number_as_it_is_may_stand_beside_it(text: str, value: Fraction) -> None:
    is_percentage = re.search(r"\d\}?\\?(%|\uff05| percent$|.text\{ per cent)", text) is not None
    assert only_number(text) == Number(Fraction(value), is_percentage=is_percentage)


@pytest.mark.parametrize("text", re.split(r" \| |\n", REFUSED.strip("\n")))
def test_a_text_that_is_more_than_a_number_or_another_is_none(text: str) -> None:
    assert only_number(text) is None
    for mark in ("\\boxed{{{}}}", "#### {}"):
        assert find_number(mark.format(text)) is None


@pytest.mark.parametrize("word", CHANGING.split())
def test_a_word_that_changes_the_value_does_so_on_both_sides_and_in_any_case(word: str) -> None:
    for text in (f"5 {word}", f"5 of a {word.upper()} of", f"{word} of 5", f"{word.title()}: 5", f"5-{word}"):
        assert only_number(text) is None


def test_fonts_are_unwrapped_and_ordinals_may_be_raised() -> None:
    for name in FONTS.split():
        assert only_number(f"\\{name}{{18}} eggs") == only_number(f"18\\{name}{{ eggs}}") == Number(Fraction(18))
        assert only_number(f"18\\{name}{{x}}") is None
    for ordinal in ("st", "nd", "rd", "th"):
        assert only_number(f"5^{{{ordinal}}}") == only_number(f"5^{ordinal} place") == Number(Fraction(5))


def test_units_stand_behind_their_digits_without_a_blank() -> None:
    for word in GLUED.split():
        assert only_number(f"5{word}") == only_number(f"5{word.upper()}") == Number(Fraction(5))
        assert only_number(f"{word}5") is None
    for letter in "mgshlLVWJNACFΩ":
        assert only_number(f"5{letter}") == only_number(f"5 {letter}") == Number(Fraction(5))
        assert only_number(f"{letter}5") is None
    for letter in "bcdefijknopqrtuvwxyzBDEGHMOPQRSTUXYZ":
        assert only_number(f"5{letter}") is only_number(f"5 {letter}") is only_number(f"{letter} 5") is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("#### 3 boxes of 6 eggs is 18", 18),
        ("#### 2 plus 3 apples are 5 and so it is 18", 18),
        ("#### The square root of it is 18", 18),
        ("#### The answer is negative 18", None),
        (r"#### The answer of all is \text{minus} 18", None),
        (r"#### It is then about 18 \text{ million}", None),
        ("#### 3 boxes of 6", None),
        (r"\boxed{3 boxes of 6 eggs is 18}", None),
        (r"\boxed{\text{There are 3 boxes of 6 eggs each, and that is } 18}", 18),
        (r"\boxed{\text{The temperature fell by this much: the answer is negative } 18}", None),
        (r"\boxed{x^4 + 3x^3 + 2x^2 + \frac{x}{4} + \sqrt{x} + \sin x + 18}", None),
    ],
)
def test_of_a_marked_sentence_the_last_number_is_taken_unless_the_next_word_changes_it(
    text: str, value: int | None
) -> None:
    assert find_number(text) == (None if value is None else Number(Fraction(value)))


def test_prose_is_long_and_worded() -> None:
    assert is_prose("She sold 48/2 = 24 clips, so 72 together.")
    assert not is_prose("She sold 24 clips, so 72.")
    assert not is_prose("48/2 = 24 and 24 + 48 = 72 and 72 * 1 = 72, so")


def test_the_last_number_has_its_blanks_and_its_dash() -> None:
    assert last_number("5 and then 1\u202f800") == Number(Fraction(1800))
    assert last_number(r"1\,\frac{1}{2}") == Number(Fraction(3, 2))
    assert last_number("pages 10\u201318") == Number(Fraction(18))
    assert sentence_number("no number") is last_number("no number") is None


@pytest.mark.timeout(60)  # linear time is a fraction of a second, anything above it hours
@pytest.mark.parametrize(
    "text",
    [
        *(piece * 10**5 + "= 5" for piece in ("(", "\\text{", "a-", "*5", "1 x ", "a b ", "a, ", "\\frac {a ", "1^")),
        "one two six ten 10^10^10",
        "one two six ten 1e999999999",
    ],
)
def test_any_text_is_read_in_linear_time(text: str) -> None:
    for part in (text, text[:399], text[-399:]):
        for mark in ("\\boxed{{{}}}", "#### {}", "{}"):
            number = find_number(mark.format(part))
            assert number is None or abs(number.value) < 100

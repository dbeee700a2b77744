"""Numbers in words."""

import pytest

from nemo_lowprec.report.page.words import amount, count, duration, folded, parameters, size


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        (size(0), "0 B"),
        (size(1023), "1,023 B"),
        (size(1024), "1.0 KiB"),
        (size(3 * 2**30), "3.0 GiB"),
        (size(5000 * 2**30), "5,000.0 GiB"),
        (duration(3.14), "3.1 s"),
        (duration(59.99), "60.0 s"),
        (duration(372), "6 min 12 s"),
        (duration(7500), "2 h 5 min"),
        (count(1, "layer"), "1 layer"),
        (count(0, "layer"), "0 layers"),
        (count(2000, "process", "es"), "2,000 processes"),
        (amount(9.2345, "dB"), "9.23 dB"),
        (amount(12345.6, "%"), "12,346 %"),
        (amount(0.5, ""), "0.5"),
        (parameters(101_234_176), "101 M"),
        (parameters(8_030_261_248), "8.03 B"),
        (parameters(999), "999"),
        (" | ".join(folded("bf16_with_fp8_mixed fp8_margin=1", 20)), "bf16_with_fp8_mixed  | fp8_margin=1"),
        (" | ".join(folded("msamp_o2", 20)), "msamp_o2"),
        (" | ".join(folded("a_very-long-word_b", 6)), "a_ | very-long-word_ | b"),
    ],
)
def test_a_number_reads_as_people_write_it(said: str, wanted: str) -> None:
    assert said == wanted

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.pht import Figures, PerformanceTable
from router.report import Counters, Report
from router.store import CorruptTableError, load_table, save_table

DEPTH = 30


def _counters(n: int) -> Counters:
    """What a replica would have counted after ``n`` requests of 11 tokens."""
    return Counters(n, 11 * n, 0.5 * n, 1.0 * n, 10 * n, -2.75 * n, 8.25 * n, 2.0 * n)


def _report(n: int, replica: int = 0, epoch: int = 1) -> Report:
    return Report("tiny", replica, epoch, running=0, waiting=0, counters={DEPTH: _counters(n)})


def test_figures_are_ratios_of_the_sums():
    figures = Figures.of(_counters(4))
    assert (figures.throughput, figures.ttft_s, figures.tpot_s) == (5.5, 0.5, 0.1)
    assert figures.perplexity == pytest.approx(math.exp(0.25))
    assert figures.confidence == pytest.approx(0.75)


def test_without_evidence_there_are_no_figures():
    assert PerformanceTable().figures("tiny") == Figures(0, 0, None, None, None, None, None)


def test_a_repeated_report_adds_nothing():
    table = PerformanceTable()
    assert table.record(_report(3))
    assert not table.record(_report(3))
    assert table.sums == {("tiny", DEPTH): _counters(3)}


def test_a_restarted_replica_counts_from_zero_and_loses_nothing():
    table = PerformanceTable()
    for report in (_report(3), _report(2, epoch=2), _report(4, epoch=2)):
        table.record(report)
    assert table.sums[("tiny", DEPTH)] == _counters(7)


def test_reports_that_were_overtaken_are_dropped():
    table = PerformanceTable()
    for report in (_report(5, epoch=2), _report(9, epoch=1), _report(4, epoch=2)):
        table.record(report)
    assert table.sums[("tiny", DEPTH)] == _counters(5)


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(1, 3), st.integers(0, 9)), max_size=30), st.randoms())
def test_lost_and_repeated_reports_change_nothing_once_the_last_one_arrives(reported, random):
    """Per replica: any subset of what it reported, in order, gives the sums of each life's last arrived report."""
    ordered = sorted(set(reported))
    arrived = [entry for entry in ordered for _ in range(random.randint(0, 2))]
    table = PerformanceTable()
    for replica, epoch, count in arrived:
        table.record(_report(count, replica, epoch))
    last = {(replica, epoch): count for replica, epoch, count in arrived}
    assert table.sums.get(("tiny", DEPTH), Counters()).requests == sum(last.values())


def test_another_configuration_starts_without_evidence():
    table = PerformanceTable()
    table.keep_only({"tiny": "a"})
    table.record(_report(3))
    table.keep_only({"tiny": "a"})
    assert table.figures("tiny").requests == 3
    table.keep_only({"tiny": "b"})
    assert table.figures("tiny").requests == 0


def test_the_table_survives_a_restart(tmp_path):
    path = tmp_path / "state" / "pht.json"
    table = PerformanceTable()
    table.keep_only({"tiny": "a"})
    table.record(_report(3))
    save_table(table, path)
    again = load_table(path)
    assert again == table
    again.record(_report(3))
    assert again.figures("tiny").requests == 3
    assert [file.name for file in path.parent.iterdir()] == ["pht.json"]


def test_a_missing_file_is_an_empty_table(tmp_path):
    assert load_table(tmp_path / "none.json") == PerformanceTable()


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"version": 99}', '{"version": 1, "fingerprints": {}}'])
def test_a_corrupt_file_is_refused_with_its_reason_and_kept_aside(tmp_path, text):
    path = tmp_path / "pht.json"
    path.write_text(text)
    with pytest.raises(CorruptTableError, match=r"pht\.json is not a performance table"):
        load_table(path)
    assert not path.exists()
    assert (tmp_path / "pht.json.corrupt").read_text() == text

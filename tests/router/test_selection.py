from router.pht import Figures
from router.selection import TRIALS, Candidate, choose


def _candidate(model: str, requests: int = 0, throughput=None, ttft_s=None, assigned: int = 0) -> Candidate:
    return Candidate(model, Figures(requests, 0, throughput, ttft_s, None, None, None), assigned)


def test_one_model_is_taken_without_a_trial():
    assert choose([_candidate("a")], "throughput").model == "a"


def test_each_model_gets_its_trials_in_configured_order():
    given_out = {"a": 0, "b": 0}
    order = []
    for _ in range(2 * TRIALS):
        model = choose([_candidate(m, assigned=n) for m, n in given_out.items()], "throughput").model
        given_out[model] += 1
        order.append(model)
    assert order == ["a"] * TRIALS + ["b"] * TRIALS


def test_evidence_from_before_a_restart_counts_as_trials():
    candidates = [_candidate("a", 9, throughput=10.0), _candidate("b", 9, throughput=20.0)]
    assert choose(candidates, "throughput").model == "b"


def test_the_objective_decides_and_the_reason_shows_the_figures():
    candidates = [
        _candidate("quick", 9, throughput=10.0, ttft_s=0.01),
        _candidate("wide", 9, throughput=40.0, ttft_s=0.05),
    ]
    latency, throughput = choose(candidates, "latency"), choose(candidates, "throughput")
    assert (latency.model, throughput.model) == ("quick", "wide")
    assert latency.reason == "best latency: quick 10 ms to first token, wide 50 ms to first token"
    assert throughput.reason == "best throughput: quick 10.0 tokens/s, wide 40.0 tokens/s"


def test_trials_given_out_but_not_finished_spread_over_models():
    candidates = [_candidate("a", assigned=7), _candidate("b", assigned=6)]
    assert choose(candidates, "latency").model == "b"


def test_a_model_whose_trials_never_finished_is_not_ranked():
    candidates = [_candidate("a", assigned=7), _candidate("b", 6, throughput=1.0, assigned=6)]
    assert choose(candidates, "throughput").model == "b"

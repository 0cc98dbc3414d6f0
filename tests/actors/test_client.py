import pytest

import actors.client
from engine.errors import InvalidRequestError, ModelNotFoundError

pytestmark = pytest.mark.cluster


@pytest.fixture
def client(lab):
    with actors.client.connect(app="lab") as client:
        yield client


def test_generate_takes_text_messages_or_ids(client):
    for given in ({"prompt": "hi"}, {"prompt": [5, 6]}, {"messages": [{"role": "user", "content": "hi"}]}):
        assert len(client.generate(**given, max_tokens=3, ignore_eos=True).tokens) == 3


def test_a_stream_gives_the_same_text_as_generate(client):
    sampling = {"max_tokens": 20, "seed": 1, "ignore_eos": True}
    parts = [delta.text for delta in client.stream("hi", **sampling)]
    assert "".join(parts) == client.generate("hi", **sampling).text


def test_a_stream_may_be_left_early(client):
    stream = client.stream("hi", ignore_eos=True)
    assert next(stream).tokens
    stream.close()


def test_models_and_status_show_what_runs(client):
    assert [(info.name, info.replica) for info in client.models()] == [("tiny", 0), ("tiny", 1)]
    assert [model.model for model in client.status().models] == ["tiny"]


def test_misspelt_parameters_and_missing_prompts_are_refused(client):
    with pytest.raises(InvalidRequestError, match="did you mean temperature"):
        client.generate("hi", temprature=0.5)
    with pytest.raises(InvalidRequestError, match=r"give either prompt=\.\.\. or messages"):
        client.generate()


def test_an_app_that_does_not_run_is_named_with_those_that_do(lab):
    with pytest.raises(ModelNotFoundError, match=r"no app named 'elsewhere' is running.*lab"):
        actors.client.connect(app="elsewhere")

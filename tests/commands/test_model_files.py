import pytest

from ppl_bandit.journal.model_files import ModelFileError, bundled_models, load_model

PROGRAM = """
import numpyro
import numpyro.distributions as dist

num_arms = 2

def model(arm):
    with numpyro.plate("arms", 2):
        rate = numpyro.sample("rate", dist.Beta(1.0, 1.0))
    numpyro.sample("reward", dist.Bernoulli(rate[arm]))

def other(arm):
    pass
"""


def write(folder, text, name="mine.py"):
    path = folder / name
    path.write_text(text)
    return path


def test_a_bundled_model_is_named_without_a_path():
    model = load_model("bernoulli")
    assert (model.name, model.num_arms, model.outcomes) == ("bernoulli", 3, ("reward",))
    assert model.path == bundled_models()["bernoulli"]
    assert model.context is None and model.contexts is None
    assert set(model.truth) == {"rate"}


def test_every_variable_of_a_file_is_read():
    model = load_model("poisson")
    assert set(model.context) == {"exposure"} and model.contexts is not None
    assert load_model("hurdle").outcomes == ("conversion", "spend")


@pytest.mark.parametrize("kind", [str, lambda path: path], ids=["text", "path"])
def test_a_model_is_loaded_by_path(tmp_path, kind):
    path = write(tmp_path, PROGRAM)
    model = load_model(kind(path))
    assert (model.name, model.path, model.num_arms) == ("mine", path, 2)
    assert model.program.__name__ == "model"
    assert model.truth is None


def test_another_function_of_the_file_can_be_named(tmp_path):
    model = load_model(f"{write(tmp_path, PROGRAM)}:other")
    assert model.program.__name__ == "other"
    assert model.name == "mine:other"


def test_a_relative_path_is_read_from_the_current_folder(tmp_path, monkeypatch):
    write(tmp_path, PROGRAM, "bernoulli.py")
    monkeypatch.chdir(tmp_path)
    assert load_model("bernoulli.py").num_arms == 2
    assert load_model("bernoulli").num_arms == 3


def test_a_missing_name_lists_the_bundled_models_and_the_nearest(tmp_path):
    with pytest.raises(ModelFileError, match=r"no bundled model 'bernouli'; did you mean 'bernoulli'\?.*student_t"):
        load_model("bernouli")
    with pytest.raises(ModelFileError, match=r"no file '.*gausian\.py'; did you mean 'gaussian'\?"):
        load_model(str(tmp_path / "gausian.py"))
    with pytest.raises(ModelFileError, match=r"no bundled model 'zzz'; give a path"):
        load_model("zzz")


def test_a_file_of_another_kind_is_refused(tmp_path):
    with pytest.raises(ModelFileError, match=r"not a Python file"):
        load_model(str(write(tmp_path, PROGRAM, "mine.txt")))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (PROGRAM.replace("def model", "def modell"), r"no function `model`.*its functions: modell, other"),
        ("num_arms = 2\nmodel = 3", r"no function `model`.*its functions: none"),
        (PROGRAM.replace("num_arms = 2", ""), r"does not define num_arms.*`num_arms = 3`"),
        (PROGRAM.replace("num_arms = 2", "num_arms = 2.0"), r"positive integer, got 2\.0"),
        (PROGRAM.replace("num_arms = 2", "num_arms = 0"), r"positive integer, got 0"),
        (PROGRAM.replace("num_arms = 2", "num_arms = True"), r"positive integer, got True"),
        (PROGRAM + "outcomes = 'reward'", r"outcomes must be a tuple.*got 'reward'"),
        (PROGRAM + "outcomes = (1,)", r"outcomes must be a tuple"),
        (PROGRAM + "truth = [0.5, 0.5]", r"truth must be a dictionary.*got list"),
        (PROGRAM + "contexts = 3", r"contexts must be a function"),
    ],
)
def test_an_invalid_file_is_refused_with_the_remedy(tmp_path, text, message):
    path = write(tmp_path, text)
    with pytest.raises(ModelFileError, match=message) as caught:
        load_model(str(path))
    assert str(path) in str(caught.value)


def test_a_missing_function_lists_those_there_are(tmp_path):
    with pytest.raises(ModelFileError, match=r"no function `third`; its functions: model, other"):
        load_model(f"{write(tmp_path, PROGRAM)}:third")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import numpyro\n\nimport no_such_library\n", r"mine\.py:3: ModuleNotFoundError: .*no_such_library"),
        ("def model(arm:\n    pass\n", r"mine\.py:1: SyntaxError"),
        ("def fail():\n    return 1 / 0\n\nfail()\n", r"mine\.py:2: ZeroDivisionError"),
        ("import math\nmath.sqrt('x')\n", r"mine\.py:2: TypeError"),
    ],
)
def test_an_error_inside_the_file_is_reported_with_its_line(tmp_path, text, message):
    with pytest.raises(ModelFileError, match=message):
        load_model(str(write(tmp_path, text)))

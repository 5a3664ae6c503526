import pytest

from infini_llama.configs.errors import ConfigError
from infini_llama.configs.loading import parse_config
from infini_llama.flows.naming import home_folder, resolved


@pytest.fixture(params=["file", "file/below"])
def home(request, tmp_path):
    (tmp_path / "file").touch()
    return str(tmp_path / request.param)


def test_a_home_that_is_a_file_is_a_wrong_setting(home, monkeypatch):
    with pytest.raises(ConfigError, match=r"runtime\.home"):
        resolved(parse_config({"data": {"source": "python-stdlib"}, "runtime": {"home": home}}))
    monkeypatch.setenv("INFINI_LLAMA_HOME", home)
    with pytest.raises(ConfigError, match="INFINI_LLAMA_HOME"):
        home_folder()


def test_a_missing_home_is_accepted(tmp_path, monkeypatch):
    monkeypatch.setenv("INFINI_LLAMA_HOME", str(tmp_path / "new" / "home"))
    assert home_folder() == tmp_path / "new" / "home"

"""What the set-up tells the faster installer of what pip was told."""

from tests.install import settings_of_pip, told_to_uv

LISTED = r"""
:env:.default-timeout='180'
:env:.find-links='/wheels'
global.extra-index-url='\nhttps://one.example/simple\nhttps://two.example/simple'
global.index-url='https://user:word@index.example/simple'
global.find-links='/elsewhere'
install.index-url='https://nearer.example/simple'
download.index-url='https://unasked.example/simple'
""".splitlines()


def test_the_environment_beats_the_file_and_install_beats_global() -> None:
    """As pip has it; what is said of another command is not for `pip install`."""
    assert settings_of_pip(LISTED) == {
        "index-url": "https://nearer.example/simple",
        "extra-index-url": "\nhttps://one.example/simple\nhttps://two.example/simple",
        "find-links": "/wheels",
        "default-timeout": "180",
    }


def test_the_installer_learns_of_every_index_that_pip_knows() -> None:
    """A mirror, more indexes, a folder of wheels: each in the variable, and separated as, uv has it."""
    told = told_to_uv({**settings_of_pip(LISTED), "find-links": "/wheels /more"})
    assert told is not None
    assert told["UV_INDEX_URL"] == "https://nearer.example/simple"
    assert told["UV_EXTRA_INDEX_URL"] == "https://one.example/simple https://two.example/simple"
    assert told["UV_FIND_LINKS"] == "/wheels,/more"


def test_what_pip_alone_understands_is_left_to_pip() -> None:
    """A person's constraints are not lost on the way; a colour or a number of retries keeps nobody from being quick."""
    assert told_to_uv({"no-color": "true", "retries": "1"}) is not None
    assert told_to_uv({"constraint": "/pins.txt"}) is None

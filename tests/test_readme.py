"""What README.md and docs/ tell people to type is what the code does."""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer

from actors.config import AppConfig, load_config
from deploy.cli.app import app
from engine.checkpoint.store import DEFAULT_MODEL

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str) -> list[str]:
    return [text for kind, text in BLOCK.findall(page.read_text(encoding="utf-8")) if kind == language]


def commands() -> list[str]:
    """Every ``helios …`` line in a block of commands, comments and the virtual environment's path left off."""
    lines = [line for page in PAGES for block in blocks(page, "") for line in block.splitlines()]
    found = [re.sub(r"^\.venv/bin/", "", line.split(" #")[0].strip()) for line in lines]
    return sorted({line for line in found if line.startswith("helios ")})


@pytest.mark.parametrize("command", commands())
def test_every_command_is_one_that_the_command_line_understands(command: str) -> None:
    words = shlex.split(command)[1:]
    group = typer.main.get_command(app)
    context = group.make_context("helios", words, resilient_parsing=False)
    while hasattr(group, "commands"):  # down to the command itself, whose options are then parsed and not run
        name, group, words = group.resolve_command(context, [*context._protected_args, *context.args])
        context = group.make_context(name, words, parent=context)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_examples_compile(page: Path) -> None:
    for block in blocks(page, "python"):
        compile(block, page.name, "exec")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_generation_in_a_python_example_has_an_end(page: Path) -> None:
    for block in blocks(page, "python"):
        calls = re.findall(r"\.(?:generate|stream|chat|create)\(|generate\.remote\(", block)
        assert block.count("max_tokens") >= len(calls), f"{page.name}: without max_tokens the whole context is filled"


def test_an_editable_install_is_found_beside_a_clone_named_helios() -> None:
    """setuptools then puts the folder on the path; its import hook would come after a folder named helios."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["tool"]["setuptools"]["package-dir"] == {"": "."}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
        assert (page.parent / link).exists(), f"{page.name} links to {link}"


def test_the_example_configuration_holds_every_key_with_its_default() -> None:
    given = load_config(ROOT / "docs" / "helios.yaml")
    default = AppConfig.model_validate({"models": [{"name": DEFAULT_MODEL}]})
    assert given == default
    text = (ROOT / "docs" / "helios.yaml").read_text(encoding="utf-8")
    for section in (AppConfig, type(default.http), type(default.router), type(default.models[0])):
        for key in section.model_fields:
            assert re.search(rf"^[\s-]*{key}:", text, re.MULTILINE), f"helios.yaml lacks {key}"


def test_the_makefile_has_the_targets_that_the_pages_name() -> None:
    named = {target for page in PAGES for target in re.findall(r"make ([a-z]+)", page.read_text(encoding="utf-8"))}
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert {name for name in named if name in ("demo", "test", "check", "format", "install", "model")} <= set(targets)


@pytest.mark.model
def test_the_offline_example_of_the_readme_runs() -> None:
    example = next(block for block in blocks(ROOT / "README.md", "python") if "LLM(" in block)
    done = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) > 10


@pytest.mark.model
@pytest.mark.cluster
@pytest.mark.timeout(600)
def test_the_demo_answers_and_leaves_nothing_running(tmp_path: Path, smollm2_dir: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "models").symlink_to(smollm2_dir.parent)
    helios = Path(sys.executable).with_name("helios")
    env = {**os.environ, "HELIOS_HOME": str(home)}
    done = subprocess.run([helios, "demo"], capture_output=True, text=True, timeout=500, check=False, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "sky" in done.stdout.split("4. What happened")[0].split("3. A prompt")[1].lower()
    assert "tokens/s" in done.stdout
    assert "stopped Ray at" in done.stdout
    assert not (home / "run" / "ray.json").exists()

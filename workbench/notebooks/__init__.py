"""Notebooks: starting from a template, executing with parameters, sharing, and reproducing."""

from workbench.notebooks.executing import Executed, execute
from workbench.notebooks.reproducing import Reproduction, reproduce, what_runs
from workbench.notebooks.sharing import Shared, share
from workbench.notebooks.templates import new, template_path

__all__ = ["Executed", "Reproduction", "Shared", "execute", "new", "reproduce", "share", "template_path", "what_runs"]

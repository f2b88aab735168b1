"""Notebooks as things to start from, to execute, to send to somebody, and to run again."""

from workbench.notebooks._execute import Executed, execute
from workbench.notebooks._reproduce import Reproduction, reproduce
from workbench.notebooks._share import Shared, share
from workbench.notebooks._templates import new, template_path

__all__ = ["Executed", "Reproduction", "Shared", "execute", "new", "reproduce", "share", "template_path"]

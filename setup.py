"""Builds hvdlite; everything there is to say stands in pyproject.toml."""

from setuptools import setup

setup()

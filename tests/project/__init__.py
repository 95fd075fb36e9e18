"""Tests of the project as a whole: commands, hostile files, notebooks, packaging, tools."""

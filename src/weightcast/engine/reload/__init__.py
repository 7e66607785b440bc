"""Engines that can only load a folder: `ReloadAgent` keeps one at a channel's versions, through a mirror."""

"""What plugs into other people's trainers."""

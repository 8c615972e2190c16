"""Scripts that measure Paceline beside other systems. Not part of the package, which never imports them."""

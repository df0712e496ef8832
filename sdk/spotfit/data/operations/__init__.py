"""What the methods of `Dataset` do beyond transforms of rows."""

"""Two checkouts of mpidist measured in turn, launch by launch, with the same cases."""

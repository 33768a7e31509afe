"""`mxk report` and `mxk explain --html`: one self-contained page of what runs, why, how fast and how exact."""

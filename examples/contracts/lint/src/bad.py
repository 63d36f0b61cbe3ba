print("bad"

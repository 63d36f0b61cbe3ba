def add(a, b):
    return round(a + b, 2)

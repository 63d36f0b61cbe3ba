print("good")

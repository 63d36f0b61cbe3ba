import unittest

from money import add


class TestAdd(unittest.TestCase):
    def test_cents(self):
        self.assertEqual(add(0.1, 0.2), 0.3)


if __name__ == "__main__":
    with open("results.txt", "w") as out:
        result = unittest.TextTestRunner(out, verbosity=2).run(unittest.defaultTestLoader.loadTestsFromTestCase(TestAdd))
    raise SystemExit(not result.wasSuccessful())

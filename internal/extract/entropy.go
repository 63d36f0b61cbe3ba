package extract

import "math"

// Entropy returns the Shannon entropy of s in bits per byte, 0 to 8.
func Entropy(s string) float64 {
	var count [256]int
	for i := range len(s) {
		count[s[i]]++
	}
	return bits(count[:], len(s))
}

// bits returns the entropy of n symbols of which count has the frequencies.
func bits(count []int, n int) (e float64) {
	for _, c := range count {
		if c > 0 {
			p := float64(c) / float64(n)
			e -= p * math.Log2(p)
		}
	}
	return e
}

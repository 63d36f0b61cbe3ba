package inspect

// Cached returns how many sandboxes, and how many hosts of one, are in the cache.
func Cached(a *Authority, sandbox string) (authorities, leaves int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return len(a.all), len(a.all[sandbox].leaves)
}

package sandbox

// Waiting returns how many sandboxes wait to be asked for, and how many bytes
// of memory they take.
func (f *Fleet) Waiting() (n int, memory int64) {
	f.pool.mu.Lock()
	defer f.pool.mu.Unlock()
	for _, w := range f.pool.warm {
		memory += w.memory
	}
	return len(f.pool.warm), memory
}

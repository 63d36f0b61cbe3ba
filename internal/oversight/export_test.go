package oversight

import "golang.org/x/sync/semaphore"

// Hold bounds the large payloads that the gate executes at the same time.
func (g *Gate) Hold(bytes int64) { g.room, g.held = bytes, semaphore.NewWeighted(bytes) }

// Page makes the gate look at so many actions at a time.
func (g *Gate) Page(n int) { g.page = n }

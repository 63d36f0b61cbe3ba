package oversight

import "golang.org/x/sync/semaphore"

// Hold bounds the large payloads that the gate executes at the same time.
func (g *Gate) Hold(bytes int64) { g.room, g.held = bytes, semaphore.NewWeighted(bytes) }

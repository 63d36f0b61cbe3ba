package api

import "time"

// A Trace shows how long the steps of the newest operation on a sandbox took.
type Trace struct {
	Sandbox string      `json:"sandbox"` // ID
	Steps   []TraceStep `json:"steps"`   // the request itself first, then by start
}

// A TraceStep is a step of a [Trace].
type TraceStep struct {
	Name     string    `json:"name"`
	Depth    int       `json:"depth"` // 0 for the request itself, 1 for its steps, and so on
	Start    time.Time `json:"start"`
	Duration int64     `json:"duration_us"` // microseconds
	Failed   bool      `json:"failed"`
}

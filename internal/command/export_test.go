package command

import (
	"context"
	"time"

	"postern/internal/auth"
	"postern/internal/connection"
)

// SetKillTime sets how long a killed process may take to end.
func (a *Admission) SetKillTime(d time.Duration) { a.killTime = d }

// CloseEnded is one iteration of [Admission.Run].
var CloseEnded = (*Admission).closeEnded

// Prune removes old records.
var Prune = (*Admission).prune

// Limit sets the time limit of a process in a bound sandbox, as an allowed start does.
func (a *Admission) Limit(ctx context.Context, who auth.Principal, pid int32, d time.Duration) {
	a.mu.Lock()
	l, b := a.ledgers[who.ID], a.bindings[who.ID]
	a.mu.Unlock()
	a.limit(ctx, who, l, b, pid, d)
}

// Timers returns how many processes of a sandbox have a time limit.
func (a *Admission) Timers(sandboxID string) int {
	a.mu.Lock()
	l := a.ledgers[sandboxID]
	a.mu.Unlock()
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.timers)
}

// Close closes the files, as the end of the process does.
func (a *Admission) Close() {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, l := range a.ledgers {
		_ = l.close()
	}
}

var (
	Quote      = quote
	Visible    = visible
	ReadRecord = readRecord
	KeptArgs   = keptArgs
)

const PartSize = partSize

// Rules returns the rules that a applies.
func Rules(a *Admission) *connection.Admission { return a.rules }

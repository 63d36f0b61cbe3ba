package notify

import (
	"context"
	"time"
)

// Poll lets a test read from Telegram once, as the server named holder.
func (n *Notifier) Poll(ctx context.Context, holder string, long time.Duration) (time.Duration, error) {
	return n.poll(ctx, holder, long)
}

// Prune lets a test forget what is over.
func (n *Notifier) Prune(ctx context.Context) error { return n.prune(ctx) }

// ParsePress reports whether s is what a button of ours could send.
func ParsePress(s string) bool {
	_, ok := parsePress(s)
	return ok
}

// Inert lets a test look at what is made of an agent's text.
func Inert(s string, most int) string { return defang(s, most) }

package guest

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"sync"
	"time"

	"postern/internal/guest/processpb"
)

// The limits of the guest's log. Without them a client that starts processes in a
// loop could fill the host's disk.
const (
	logRate   = 20  // lines per second on average
	logBurst  = 200 // lines at once
	maxLogged = 512 // bytes of a command line; with everything else a line is written at once
)

// NewLog returns the guest's log. Each line is a JSON object with timestamp, level,
// logger and message, as E2B's clients expect. Lines beyond the limits are dropped
// and counted.
func NewLog(w io.Writer) *slog.Logger {
	h := slog.NewJSONHandler(w, &slog.HandlerOptions{ReplaceAttr: func(groups []string, a slog.Attr) slog.Attr {
		if len(groups) > 0 {
			return a
		}
		switch a.Key {
		case slog.TimeKey:
			a.Key = "timestamp"
			a.Value = slog.TimeValue(a.Value.Time().UTC())
		case slog.LevelKey:
			a.Value = slog.StringValue(strings.ToLower(a.Value.String()))
		case slog.MessageKey:
			a.Key = "message"
		}
		return a
	}})
	return slog.New(&limitedHandler{Handler: h, limit: &limit{tokens: logBurst}})
}

// A limitedHandler drops records beyond the rate limit.
type limitedHandler struct {
	slog.Handler
	limit *limit // shared with derived handlers
}

type limit struct {
	mu      sync.Mutex
	tokens  float64
	at      time.Time
	dropped int
}

// take reports whether a line may be written at now, and how many were dropped
// since the last one.
func (l *limit) take(now time.Time) (ok bool, dropped int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if passed := now.Sub(l.at).Seconds(); passed > 0 { // negative if the clock was set back after a restore
		l.tokens = min(l.tokens+passed*logRate, logBurst)
	}
	l.at = now
	if l.tokens < 1 {
		l.dropped++
		return false, 0
	}
	l.tokens--
	dropped, l.dropped = l.dropped, 0
	return true, dropped
}

// Handle implements [slog.Handler].
func (h *limitedHandler) Handle(ctx context.Context, r slog.Record) error {
	ok, dropped := h.limit.take(r.Time)
	if !ok {
		return nil
	}
	if dropped > 0 {
		r.AddAttrs(slog.Int("left_out_before", dropped))
	}
	return h.Handler.Handle(ctx, r)
}

// WithAttrs implements [slog.Handler].
func (h *limitedHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	return &limitedHandler{h.Handler.WithAttrs(attrs), h.limit}
}

// WithGroup implements [slog.Handler].
func (h *limitedHandler) WithGroup(name string) slog.Handler {
	return &limitedHandler{h.Handler.WithGroup(name), h.limit}
}

func (s *Server) logStart(p *process, a account) {
	attrs := []any{"pid", p.pid, "cmd", commandLine(p.config), "user", a.name}
	if p.tag != nil {
		attrs = append(attrs, "tag", cut(*p.tag))
	}
	s.processLog.Info("process started", attrs...)
}

func (s *Server) logEnd(p *process, ran time.Duration) {
	e := p.ended()
	attrs := []any{"pid", p.pid, "exit_code", e.GetExitCode(), "status", e.GetStatus(), "duration_ms", ran.Milliseconds()}
	if e.GetError() != "" && e.GetError() != e.GetStatus() {
		attrs = append(attrs, "error", e.GetError())
	}
	s.processLog.Info("process ended", attrs...)
}

// commandLine returns the command line of a process for people to read.
func commandLine(c *processpb.ProcessConfig) string {
	var b strings.Builder
	b.WriteString(cut(c.GetCmd()))
	for _, arg := range c.GetArgs() {
		if b.Len() > maxLogged {
			break
		}
		fmt.Fprintf(&b, " %s", cut(arg))
	}
	return cut(b.String())
}

// cut shortens s for the log.
func cut(s string) string {
	if len(s) <= maxLogged {
		return s
	}
	return utf8(s[:maxLogged]) + "…"
}

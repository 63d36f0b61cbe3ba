package e2bapi

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"time"

	"postern/internal/auth"
	"postern/internal/sandbox"
)

// logEntry is a log line in JSON.
type logEntry struct {
	Timestamp string            `json:"timestamp"`
	Level     sandbox.Level     `json:"level"`
	Message   string            `json:"message"`
	Fields    map[string]string `json:"fields"`
}

func logEntryOf(e sandbox.LogEntry) logEntry {
	out := logEntry{Timestamp: e.At.Format(time.RFC3339Nano), Level: e.Level, Message: e.Message, Fields: map[string]string{}}
	maps.Copy(out.Fields, e.Fields)
	out.Fields["logger"] = e.Logger
	return out
}

// flat returns e as one line of JSON with level and logger, as E2B's CLI expects.
func flat(e sandbox.LogEntry) string {
	m := map[string]string{}
	maps.Copy(m, e.Fields)
	m["timestamp"], m["level"], m["logger"], m["message"] = e.At.Format(time.RFC3339Nano), string(e.Level), e.Logger, e.Message
	b, err := json.Marshal(m)
	if err != nil { // strings always marshal
		return `{"level":"error","logger":"postern","message":"unreadable"}`
	}
	return string(b)
}

// millis returns a query parameter in milliseconds since 1970 as a time.
func millis(q url.Values, name string) (time.Time, error) {
	n, err := number(q, name, -1, 0, 1<<52)
	if err != nil || n < 0 {
		return time.Time{}, err
	}
	return time.UnixMilli(n), nil
}

// readLogs reads lines of the log of the sandbox in r's path. A limit of 0 returns
// none.
func (s *Server) readLogs(r *http.Request, who auth.Principal, q sandbox.LogQuery) ([]sandbox.LogEntry, error) {
	limit, err := number(r.URL.Query(), "limit", 1000, 0, 1<<31)
	if err != nil {
		return nil, err
	}
	q.Limit = int(min(limit, 1000))
	if q.Limit == 0 {
		q.Limit = 1 // the sandbox must still be checked
	}
	es, err := s.conf.Logs.Read(r.Context(), who, shortID(r.PathValue("id")), q)
	if limit == 0 {
		es = nil
	}
	return es, err
}

// sandboxLogs is E2B's v1: the oldest lines since start.
func (s *Server) sandboxLogs(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	start, err := millis(r.URL.Query(), "start")
	if err != nil {
		return err
	}
	es, err := s.readLogs(r, who, sandbox.LogQuery{From: start})
	if err != nil {
		return err
	}
	line := func(e sandbox.LogEntry) map[string]any {
		return map[string]any{"timestamp": e.At.Format(time.RFC3339Nano), "line": flat(e)}
	}
	reply(w, http.StatusOK, map[string]any{"logs": each(es, line), "logEntries": each(es, logEntryOf)})
	return nil
}

// sandboxLogsV2 is E2B's v2: from a cursor, in either direction.
func (s *Server) sandboxLogsV2(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	v := r.URL.Query()
	cursor, err := millis(v, "cursor")
	if err != nil {
		return err
	}
	q := sandbox.LogQuery{From: cursor, Search: v.Get("search")}
	if len(q.Search) > 256 {
		return fmt.Errorf("%w: search: must have at most 256 bytes", errRequest)
	}
	switch d := v.Get("direction"); d {
	case "", "forward":
	case "backward":
		q.Backward = true
		if !cursor.IsZero() {
			q.From = cursor.Add(time.Millisecond - 1) // include the whole millisecond of the cursor
		}
	default:
		return fmt.Errorf("%w: direction: must be forward or backward", errRequest)
	}
	if l := v.Get("level"); l != "" {
		if q.Level = sandbox.ParseLevel(l); string(q.Level) != l {
			return fmt.Errorf("%w: level: must be debug, info, warn or error", errRequest)
		}
	}
	es, err := s.readLogs(r, who, q)
	if err != nil {
		return err
	}
	reply(w, http.StatusOK, map[string]any{"logs": each(es, logEntryOf)})
	return nil
}

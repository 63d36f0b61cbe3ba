package sandbox

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"postern/internal/leak"
)

// Level is the severity of a log line.
type Level string

// The levels, least severe first.
const (
	LevelDebug Level = "debug"
	LevelInfo  Level = "info"
	LevelWarn  Level = "warn"
	LevelError Level = "error"
)

var levels = []Level{LevelDebug, LevelInfo, LevelWarn, LevelError}

// ParseLevel returns the level that s names in the spelling of any common library.
// Unknown names are info.
func ParseLevel(s string) Level {
	switch strings.ToLower(s) {
	case "debug", "trace":
		return LevelDebug
	case "warn", "warning":
		return LevelWarn
	case "error", "err", "fatal", "panic", "dpanic", "critical":
		return LevelError
	}
	return LevelInfo
}

func (l Level) atLeast(least Level) bool {
	return slices.Index(levels, l) >= slices.Index(levels, least)
}

// HostLogger is the logger of lines that the host wrote. Lines of a guest never
// have it.
const HostLogger = "postern"

// A LogEntry is a line of a log.
type LogEntry struct {
	At      time.Time
	Level   Level
	Logger  string // [HostLogger] or the guest's; never empty
	Message string
	Fields  map[string]string
}

const (
	maxLogFields = 32   // per line
	maxLogField  = 2048 // bytes of a field; a message may be as long as its line
)

// ParseLogLine parses a line that a guest wrote: a JSON object with level, logger
// and message, or any other text, which becomes the message. It never fails, and
// its result is safe to show: valid UTF-8 without control characters, secrets masked.
func ParseLogLine(line []byte) LogEntry {
	var o map[string]any
	if err := json.Unmarshal(line, &o); err != nil || o == nil {
		return LogEntry{Level: LevelInfo, Logger: "guest", Message: masked(clean(strings.TrimSpace(string(line))))}
	}
	take := func(names ...string) string {
		for _, n := range names {
			if s, ok := o[n].(string); ok {
				delete(o, n)
				return clean(s)
			}
		}
		return ""
	}
	e := LogEntry{Level: ParseLevel(take("level", "severity")), Logger: cut(take("logger"), maxLogField), Message: masked(take("message", "msg"))}
	if e.Logger == "" || strings.HasPrefix(strings.ToLower(e.Logger), HostLogger) {
		e.Logger = "guest"
	}
	// These names belong to the entry itself, so the guest cannot set them as
	// fields.
	for _, n := range []string{"level", "severity", "logger", "message", "msg", "timestamp", "time"} {
		delete(o, n)
	}
	for _, k := range slices.Sorted(maps.Keys(o)) {
		if len(e.Fields) == maxLogFields {
			break
		}
		if e.Fields == nil {
			e.Fields = map[string]string{}
		}
		v, ok := o[k].(string)
		if !ok {
			v = fmt.Sprint(o[k])
			if b, err := json.Marshal(o[k]); err == nil {
				v = string(b)
			}
		}
		if k = cut(clean(k), 128); !slices.Contains([]string{"level", "logger", "message", "timestamp"}, k) {
			e.Fields[k] = masked(cut(clean(v), maxLogField))
		}
	}
	return e
}

// masked returns a text of a log without what looks like a secret. Logs are shipped and
// shown in more places than the record, and have command lines. A text that was cut loses
// its last word: the beginning of a secret does not look like one.
func masked(s string) string {
	if whole, ok := strings.CutSuffix(s, "…"); ok {
		s = whole[:strings.LastIndexAny(whole, " \n\t")+1] + "…"
	}
	return leak.Redact(s)
}

// clean makes text safe to show. The attack: a sandbox writes escape sequences into
// its log, which take over the terminal of its reader.
func clean(s string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case r == '\t' || r == '\n':
			return r
		case r < ' ' || r >= 0x7f && r <= 0x9f, r >= 0x202a && r <= 0x202e, r >= 0x2066 && r <= 0x2069:
			return utf8.RuneError // control characters, and those that change the direction of text
		}
		return r
	}, strings.ToValidUTF8(s, "\uFFFD"))
}

// cut shortens s to at most so many bytes, at the border of a character.
func cut(s string, most int) string {
	if len(s) <= most {
		return s
	}
	for most > 0 && !utf8.RuneStart(s[most]) {
		most--
	}
	return s[:most] + "…"
}

package sandbox

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
	"unicode/utf8"
)

// Level is how much a line of a log matters.
type Level string

// The levels, from the least.
const (
	LevelDebug Level = "debug"
	LevelInfo  Level = "info"
	LevelWarn  Level = "warn"
	LevelError Level = "error"
)

var levels = []Level{LevelDebug, LevelInfo, LevelWarn, LevelError}

// ParseLevel returns the level that s names, however a library spells it, and
// info for what none names.
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

// HostLogger is the logger of lines that the host wrote. No line of a guest
// has it.
const HostLogger = "postern"

// A LogEntry is a line of a log.
type LogEntry struct {
	At      time.Time
	Level   Level
	Logger  string // [HostLogger], or what the guest says; never empty
	Message string
	Fields  map[string]string
}

const (
	maxLogFields = 32   // of a line
	maxLogField  = 2048 // bytes of a field; a message is as long as its line
)

// ParseLogLine reads what a guest wrote as one line: a JSON object with level,
// logger and message, or anything else, which is then the message. It never
// fails, and what it returns can be shown: valid text without control
// characters.
func ParseLogLine(line []byte) LogEntry {
	var o map[string]any
	if err := json.Unmarshal(line, &o); err != nil || o == nil {
		return LogEntry{Level: LevelInfo, Logger: "guest", Message: clean(strings.TrimSpace(string(line)))}
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
	e := LogEntry{Level: ParseLevel(take("level", "severity")), Logger: cut(take("logger"), maxLogField), Message: take("message", "msg")}
	if e.Logger == "" || strings.HasPrefix(strings.ToLower(e.Logger), HostLogger) {
		e.Logger = "guest"
	}
	// Ours are the names of an entry's parts, whatever is in the line.
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
			e.Fields[k] = cut(clean(v), maxLogField)
		}
	}
	return e
}

// clean makes text fit to show. The attack: a sandbox writes escape sequences
// into its log, and they take over the terminal of whoever reads it.
func clean(s string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case r == '\t' || r == '\n':
			return r
		case r < ' ' || r >= 0x7f && r <= 0x9f, r >= 0x202a && r <= 0x202e, r >= 0x2066 && r <= 0x2069:
			return utf8.RuneError // control characters, and those that turn the direction of text
		}
		return r
	}, strings.ToValidUTF8(s, "\uFFFD"))
}

func cut(s string, most int) string {
	if len(s) <= most {
		return s
	}
	for most > 0 && !utf8.RuneStart(s[most]) {
		most--
	}
	return s[:most] + "…"
}

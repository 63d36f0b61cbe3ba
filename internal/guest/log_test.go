package guest

import (
	"bytes"
	"encoding/json"
	"strings"
	"sync"
	"testing"
	"time"
)

type logLine struct {
	Timestamp time.Time
	Level     string
	Logger    string
	Message   string
	PID       int
	Cmd       string
	User      string
	ExitCode  *int `json:"exit_code"`
	LeftOut   int  `json:"left_out_before"`
}

func logLines(t *testing.T, b []byte) []logLine {
	t.Helper()
	var list []logLine
	for line := range bytes.Lines(b) {
		var l logLine
		if err := json.Unmarshal(line, &l); err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		if len(line) > 4096 {
			t.Errorf("a line of %d bytes is not one write to a pipe", len(line))
		}
		list = append(list, l)
	}
	return list
}

func TestProcessLog(t *testing.T) {
	var b safeBuffer
	g := newRig(t)
	g.s.processLog = NewLog(&b).With("logger", "process")
	hostile := "exit 3 # \"\n" + strings.Repeat("\x01é", 2000)
	g.sh(hostile)
	var got []logLine
	for end := time.Now().Add(time.Minute); len(got) < 2 && time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		got = logLines(t, b.bytes())
	}
	if len(got) != 2 {
		t.Fatalf("got %d lines, want 2", len(got))
	}
	start, end := got[0], got[1]
	if start.Level != "info" || start.Logger != "process" || start.Message != "process started" || start.PID == 0 || start.User != testUser ||
		!strings.HasPrefix(start.Cmd, "/bin/sh -c exit 3") || time.Since(start.Timestamp) > time.Hour {
		t.Errorf("start: got %+v", start)
	}
	if end.Message != "process ended" || end.PID != start.PID || end.ExitCode == nil || *end.ExitCode != 3 {
		t.Errorf("end: got %+v", end)
	}
}

// Attacker: a process for each line of log.
func TestLogIsBounded(t *testing.T) {
	var b safeBuffer
	log := NewLog(&b)
	derived := log.With("logger", "x")
	begin := time.Now()
	for range 10 * logBurst {
		log.Info("flood")
		derived.Info("flood")
	}
	most := logBurst + logRate*int(1+time.Since(begin)/time.Second)
	if got := len(logLines(t, b.bytes())); got < logBurst || got > most {
		t.Errorf("got %d lines, want %d to %d", got, logBurst, most)
	}
	l := limit{tokens: 1, at: time.Unix(100, 0)}
	for _, tt := range []struct {
		name    string
		at      int64
		ok      bool
		dropped int
	}{
		{"the last of the burst", 100, true, 0},
		{"too much", 100, false, 0},
		{"too much", 100, false, 0},
		{"the clock was set back", 50, false, 0},
		{"later", 51, true, 3},
		{"none dropped since", 51, true, 0},
	} {
		if ok, dropped := l.take(time.Unix(tt.at, 0)); ok != tt.ok || dropped != tt.dropped {
			t.Errorf("%s: got %v, %d, want %v, %d", tt.name, ok, dropped, tt.ok, tt.dropped)
		}
	}
}

func TestUserDB(t *testing.T) {
	var d userDB
	a, err := d.account(testUser)
	if err != nil || a.uid != 65534 {
		t.Fatalf("got %v, %v", a, err)
	}
	d.accounts["ghost"] = account{name: "ghost"}
	if _, err := d.account("ghost"); err != nil {
		t.Error("nothing is remembered")
	}
	if owner, group := d.names(0, 0); owner != "root" || group != "root" {
		t.Errorf("names: got %s, %s", owner, group)
	}
	if owner, group := d.names(123456, 123457); owner != "123456" || group != "123457" {
		t.Errorf("names of nobody: got %s, %s", owner, group)
	}
	d.seen[0].ctime.Sec-- // the file has changed
	time.Sleep(freshFor)
	if _, err := d.account("ghost"); err == nil {
		t.Error("a user who is gone is still known")
	}
	for n := range uint32(3 * maxRemembered) {
		d.names(200000+n, 0)
	}
	if len(d.users) > maxRemembered+1 {
		t.Errorf("%d names are remembered", len(d.users))
	}
}

// The clocks jump over a pause; deadlines do not.
func TestPausedTimeDoesNotCount(t *testing.T) {
	for _, tt := range []struct {
		name                string
		elapsed, step, want time.Duration
	}{
		{"on time", time.Second, time.Second, time.Second},
		{"a busy machine", 4 * time.Second, time.Second, 4 * time.Second},
		{"paused for an hour", time.Hour, time.Second, time.Second},
		{"paused in the last step", time.Hour, 100 * time.Millisecond, 100 * time.Millisecond},
	} {
		if got := ranFor(tt.elapsed, tt.step); got != tt.want {
			t.Errorf("%s: got %v, want %v", tt.name, got, tt.want)
		}
	}
	// A deadline of several steps is still kept.
	g := newRig(t)
	begin := time.Now()
	p, sub, err := g.s.launch(start{
		config: shell("sleep 60").GetProcess(), account: must(lookupAccount(testUser)), dir: "/",
		deadline: begin.Add(1500 * time.Millisecond),
	})
	if err != nil {
		t.Fatal(err)
	}
	defer p.unsubscribe(sub)
	for ev := range sub.events {
		if ev.GetEnd() != nil {
			break
		}
	}
	if ran := time.Since(begin); ran < 1400*time.Millisecond || ran > time.Minute {
		t.Errorf("killed after %v, want 1.5 s", ran)
	}
}

// A safeBuffer is written by one goroutine and read by another.
type safeBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *safeBuffer) Write(b []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(b)
}

func (s *safeBuffer) bytes() []byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	return bytes.Clone(s.b.Bytes())
}

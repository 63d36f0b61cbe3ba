package sandbox

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"
)

// A StartError means that a template's start command, or its ready command, failed.
type StartError struct {
	Reason string   // in words
	Lines  []string // the last ones that it printed; hostile
}

// Error implements error.
func (e *StartError) Error() string {
	if len(e.Lines) == 0 {
		return e.Reason
	}
	return e.Reason + ": " + strings.Join(e.Lines[max(0, len(e.Lines)-lastLines):], "\n")
}

// withoutLines returns an error for logs and the record, which are no place for what
// programs print.
func withoutLines(err error) error {
	if e, ok := errors.AsType[*StartError](err); ok {
		return errors.New(e.Reason)
	}
	return err
}

const (
	// lastLines is how many lines of output the text of a StartError has.
	lastLines = 10
	// readyEvery is the pause between two runs of the ready command while a template is
	// made, as in E2B.
	readyEvery = 2 * time.Second
	// askStart is the interval at which a guest is asked how its start command is.
	askStart = 250 * time.Millisecond
	// bootReady bounds how long a sandbox that boots waits for its ready command.
	bootReady = 5 * time.Second
)

// startState is the guest's answer about the start command.
type startState struct {
	Running bool     `json:"running"`
	Code    int      `json:"code"`
	Lines   []string `json:"lines"`
	Next    int      `json:"next"`
}

// beginTemplate runs a template's start command in a sandbox that has booted.
func (f *Fleet) beginTemplate(ctx context.Context, id string, base Base) error {
	if base.StartCmd == "" {
		return nil
	}
	body, err := json.Marshal(map[string]string{"cmd": base.StartCmd})
	if err != nil {
		return err
	}
	if _, err := f.askGuest(ctx, id, f.ChannelKey(id), http.MethodPost, "/template/start", body, http.StatusNoContent); err != nil {
		return fmt.Errorf("run the start command: %w", err)
	}
	return nil
}

// startOf asks how the start command is, with the lines from a number on.
func (f *Fleet) startOf(ctx context.Context, id string, from int) (s startState, err error) {
	b, err := f.askGuest(ctx, id, f.ChannelKey(id), http.MethodGet, fmt.Sprintf("/template/start?from=%d", from), nil, http.StatusOK)
	if err == nil {
		err = json.Unmarshal(b, &s)
	}
	if err != nil {
		return s, fmt.Errorf("ask for the start command: %w", err)
	}
	for i, l := range s.Lines {
		s.Lines[i] = printable(l)
	}
	return s, nil
}

// runReady runs the ready command once and reports whether it succeeded.
func (f *Fleet) runReady(ctx context.Context, id string, base Base) (ok bool, lines []string, err error) {
	body, err := json.Marshal(map[string]string{"cmd": base.ReadyCmd})
	if err != nil {
		return false, nil, err
	}
	var s struct {
		Code  int      `json:"code"`
		Lines []string `json:"lines"`
	}
	b, err := f.askGuest(ctx, id, f.ChannelKey(id), http.MethodPost, "/template/ready", body, http.StatusOK)
	if err == nil {
		err = json.Unmarshal(b, &s)
	}
	if err != nil {
		return false, nil, fmt.Errorf("run the ready command: %w", err)
	}
	for i, l := range s.Lines {
		s.Lines[i] = printable(l)
	}
	return s.Code == 0, s.Lines, nil
}

// awaitTemplate returns when a template that has begun is ready: its ready command
// has succeeded, or its start command has ended with 0. Without a ready command that is
// after StartWait. Its error is a [StartError] if the start command failed, or if the
// template was not ready within ReadyTimeout.
func (f *Fleet) awaitTemplate(ctx context.Context, id string, base Base, output func(line string)) error {
	if base.StartCmd == "" && base.ReadyCmd == "" {
		return nil
	}
	within := f.conf.ReadyTimeout
	if base.ReadyCmd == "" {
		within = f.conf.StartWait
	}
	end := time.Now().Add(within)
	var last []string
	var nextReady time.Time
	for from := 0; ; {
		if base.StartCmd != "" {
			s, err := f.startOf(ctx, id, from)
			if err != nil {
				return err
			}
			from = s.Next
			for _, l := range s.Lines {
				output(l)
			}
			if last = append(last, s.Lines...); len(last) > 2*lastLines {
				last = last[len(last)-2*lastLines:]
			}
			switch {
			case !s.Running && s.Code != 0:
				return &StartError{fmt.Sprintf("the start command failed: exit status %d", s.Code), last}
			case !s.Running:
				return nil // as in E2B: it may have started something in the background
			}
		}
		if base.ReadyCmd != "" && !time.Now().Before(nextReady) {
			ok, lines, err := f.runReady(ctx, id, base)
			if err != nil {
				return err
			}
			for _, l := range lines {
				output(l)
			}
			if ok && base.StartCmd != "" { // what it has said meanwhile
				s, err := f.startOf(ctx, id, from)
				if err != nil {
					return err
				}
				for _, l := range s.Lines {
					output(l)
				}
			}
			if ok {
				return nil
			}
			nextReady = time.Now().Add(readyEvery)
		}
		if !time.Now().Before(end) {
			if base.ReadyCmd == "" {
				return nil
			}
			return &StartError{fmt.Sprintf("the template was not ready within %v: the ready command %.200q did not succeed", within, base.ReadyCmd), last}
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(min(askStart, max(time.Until(end), time.Millisecond))):
		}
	}
}

// startBooted runs the template's start command in a user's sandbox that had to boot.
// The sandbox runs whatever comes of it, as it would when the command ended later.
func (f *Fleet) startBooted(ctx context.Context, s Info, base Base) {
	if base.StartCmd == "" {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, bootReady)
	defer cancel()
	err := f.beginTemplate(ctx, s.ID, base)
	if err == nil && base.ReadyCmd != "" {
		err = f.awaitTemplate(ctx, s.ID, base, func(string) {})
	}
	if err != nil && !errors.Is(err, context.DeadlineExceeded) {
		f.log.WarnContext(ctx, "start a template's command in a sandbox that booted", "sandbox", s.ID, "template", s.Template, "err", err)
	}
}

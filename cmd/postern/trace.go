package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"html"
	"io"
	"os"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/spf13/pflag"

	"postern/client"
	"postern/internal/guest/processpb"
)

const traceHelp = `
Shows where the time of an operation on a sandbox goes, as a timeline. The server
measures each step of every create, resume, pause, fork and snapshot. It keeps the
newest 64 operations in memory, and sends all to an OpenTelemetry collector if it
was started with --traces.`

// A traceTool is the trace command with its flags.
type traceTool struct {
	conf     Config
	template string
	svg      string
}

func traceCommand() *command {
	t := &traceTool{}
	draw := func(fs *pflag.FlagSet) {
		pathVar(fs, &t.svg, "svg", "", "also draw the timeline into this `file`, which is replaced")
	}
	return &command{
		use: "trace", short: "show where the time of an operation on a sandbox goes", long: traceHelp,
		example: `
  postern trace create
  postern trace create --svg create.svg
  postern trace show i3kf0q2`,
		flags: t.conf.location,
		below: []*command{
			{
				use: "create", short: "create a sandbox, run echo in it, kill it and show the steps", facts: true,
				flags: func(fs *pflag.FlagSet) {
					draw(fs)
					fs.StringVar(&t.template, "template", "base", "`name` or ID of the sandbox's template")
				},
				run: onServer(&t.conf, t.create),
			},
			{
				use: "show SANDBOX", short: "show the steps of the newest operation on a sandbox", facts: true,
				complete: sandboxIDs(&t.conf), flags: draw, run: onServer(&t.conf, t.show),
			},
		},
	}
}

func (t *traceTool) show(ctx context.Context, l *local, args []string, out *output) error {
	id, err := oneArg(args, "SANDBOX")
	if err != nil {
		return err
	}
	tr, err := l.api.Sandboxes.Trace(ctx, id)
	if err != nil {
		return err
	}
	return t.print(out, tr)
}

func (t *traceTool) create(ctx context.Context, l *local, args []string, out *output) (err error) {
	if err := noArgs(args); err != nil {
		return err
	}
	begin := time.Now()
	var made sandboxFacts
	if err := l.call(ctx, "POST", "/sandboxes", map[string]any{"templateID": t.template, "timeout": 60}, &made); err != nil {
		return notFoundAs(err, "there is no template %q", t.template)
	}
	created := time.Now()
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 20*time.Second)
		defer cancel()
		err = errors.Join(err, l.call(ctx, "DELETE", "/sandboxes/"+pathSegment(made.SandboxID), nil, nil))
	}()
	d, err := l.inside(ctx, made.SandboxID, "")
	if err != nil {
		return err
	}
	first := time.Now()
	echo := &processpb.StartRequest{Process: &processpb.ProcessConfig{Cmd: "/bin/bash", Args: []string{"-l", "-c", "echo"}}}
	if err := d.run(ctx, echo, io.Discard, func(context.Context, uint32) error { return nil }); err != nil {
		return err
	}
	end := time.Now()
	tr, err := l.api.Sandboxes.Trace(ctx, made.SandboxID)
	if err != nil {
		return err
	}
	step := func(name string, depth int, from, to time.Time) client.TraceStep {
		return client.TraceStep{Name: name, Depth: depth, Start: from, Duration: to.Sub(from).Microseconds()}
	}
	steps := []client.TraceStep{step("create and first echo", 0, begin, end), step("create, as the client sees it", 1, begin, created)}
	for _, s := range tr.Steps { // the server's are steps of the create
		s.Depth += 2
		steps = append(steps, s)
	}
	tr.Steps = append(steps, step("first echo", 1, first, end))
	return t.print(out, tr)
}

// print prints a trace, and draws it if a file is named.
func (t *traceTool) print(out *output, tr client.Trace) error {
	if t.svg != "" {
		if err := os.WriteFile(t.svg, drawTrace(tr), 0o644); err != nil { //nolint:gosec // nothing in it is secret
			return fmt.Errorf("--svg: %w", err)
		}
	}
	return out.facts(tr, func() error {
		_, err := out.Write(traceText(tr))
		return err
	})
}

// traceText returns a trace as text: names, milliseconds and bars.
func traceText(tr client.Trace) []byte {
	const columns = 48
	start, whole := traceBounds(tr)
	width := 0
	for _, s := range tr.Steps {
		width = max(width, 2*s.Depth+utf8.RuneCountInString(s.Name))
	}
	column := func(d time.Duration) int { return int((d*columns + whole/2) / whole) }
	var b bytes.Buffer
	for _, s := range tr.Steps {
		name := strings.Repeat("  ", s.Depth) + printable(s.Name)
		offset, length := s.Start.Sub(start), time.Duration(s.Duration)*time.Microsecond
		from := max(0, min(column(offset), columns-1))
		to := max(from+1, min(column(offset+length), columns))
		fmt.Fprintf(&b, "%-*s %8.1f ms  %s%s", width, name, milliseconds(s), strings.Repeat(" ", from), strings.Repeat("█", to-from))
		if s.Failed {
			b.WriteString("  failed")
		}
		b.WriteByte('\n')
	}
	return b.Bytes()
}

func milliseconds(s client.TraceStep) float64 { return float64(s.Duration) / 1000 }

// traceBounds returns the start of a trace and its length, at least 1 µs.
func traceBounds(tr client.Trace) (time.Time, time.Duration) {
	if len(tr.Steps) == 0 {
		return time.Time{}, time.Microsecond
	}
	start := tr.Steps[0].Start
	end := start.Add(time.Microsecond)
	for _, s := range tr.Steps {
		if e := s.Start.Add(time.Duration(s.Duration) * time.Microsecond); e.After(end) {
			end = e
		}
	}
	return start, end.Sub(start)
}

// drawTrace draws a trace as SVG.
func drawTrace(tr client.Trace) []byte {
	const left, right, margin, row, top = 300, 600, 90, 24, 40
	start, whole := traceBounds(tr)
	x := func(d time.Duration) float64 { return left + float64(d)/float64(whole)*right }
	height := top + row*len(tr.Steps) + 12
	var b bytes.Buffer
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" font-family="system-ui, sans-serif" font-size="13">`+"\n", left+right+margin, height)
	b.WriteString(`<rect width="100%" height="100%" fill="#fff"/>` + "\n")
	grid := gridStep(whole)
	for t := time.Duration(0); t <= whole; t += grid {
		fmt.Fprintf(&b, `<line x1="%[1]f" x2="%[1]f" y1="28" y2="%[2]d" stroke="#e5e7eb"/><text x="%[1]f" y="20" fill="#6b7280" text-anchor="middle">%[3]d ms</text>`+"\n", x(t), height-8, t.Milliseconds())
	}
	colors := []string{"#1f2937", "#2563eb", "#0d9488", "#d97706", "#7c3aed"} // by depth
	for i, s := range tr.Steps {
		y := top + row*i
		offset, length := s.Start.Sub(start), time.Duration(s.Duration)*time.Microsecond
		fill := colors[min(s.Depth, len(colors)-1)]
		if s.Failed {
			fill = "#dc2626"
		}
		fmt.Fprintf(&b, `<text x="%d" y="%d" fill="#111827">%s</text>`, 12+14*s.Depth, y+12, html.EscapeString(s.Name))
		fmt.Fprintf(&b, `<rect x="%f" y="%d" width="%f" height="14" rx="2" fill="%s"/>`, x(offset), y, max(1, x(length)-left), fill)
		fmt.Fprintf(&b, `<text x="%f" y="%d" fill="#374151">%.1f</text>`+"\n", x(offset+length)+6, y+12, milliseconds(s))
	}
	b.WriteString("</svg>\n")
	return b.Bytes()
}

// gridStep returns a round distance of at most ten grid lines.
func gridStep(whole time.Duration) time.Duration {
	for unit := time.Millisecond; ; unit *= 10 {
		for _, step := range []time.Duration{unit, 2 * unit, 5 * unit} {
			if whole/step <= 10 {
				return step
			}
		}
	}
}

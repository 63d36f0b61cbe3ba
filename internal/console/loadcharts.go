package console

import (
	"fmt"
	"strings"
	"time"

	"postern/internal/sandbox"
)

// The sizes of the charts, and of the area inside that is drawn on, in units of the drawing.
const (
	loadLeft, loadRight     = 46, 316
	loadTop, loadBottom     = 8, 92
	sparkWidth, sparkHeight = 88, 20
	mostPoints              = 180 // of a line; more cannot be told apart
)

// A gridline is a line of a chart with its value.
type gridline struct {
	Y     string
	Text  string
	Limit bool // what the sandbox may use at most
}

// A chartMark is a mark on the time axis.
type chartMark struct {
	X     int
	Class string
	Text  string
}

// A chart is a drawing of at most an hour. It has classes, and no style of its own.
type chart struct {
	Label string // all of it in words, for those who do not see it
	Now   string
	What  string
	Side  string // text beside the chart
	Lines []gridline
	Path  string
	Area  string
	Marks []chartMark
}

// point is a value at a time.
type point struct {
	at time.Time
	v  float64
}

// heightOf returns the Y coordinate of a value.
func heightOf(v, most float64) float64 {
	if most <= 0 {
		return loadBottom
	}
	return loadBottom - (loadBottom-loadTop)*min(1, max(0, v/most))
}

// thinned returns at most mostPoints points: the highest of each part, since people look
// for peaks.
func thinned(all []point) []point {
	if len(all) <= mostPoints {
		return all
	}
	out := make([]point, 0, mostPoints)
	for i := range mostPoints {
		part := all[i*len(all)/mostPoints : (i+1)*len(all)/mostPoints]
		best := part[0]
		for _, p := range part {
			if p.v > best.v {
				best = p
			}
		}
		out = append(out, best)
	}
	return out
}

// drawn draws the points between two times. It draws no line across a gap, such as a pause.
func drawn(all []point, from, to time.Time, most float64) (line, area string) {
	width := to.Sub(from).Seconds()
	if width <= 0 {
		return "", ""
	}
	var b, under strings.Builder
	x := func(t time.Time) float64 {
		return loadLeft + (loadRight-loadLeft)*min(1, max(0, t.Sub(from).Seconds()/width))
	}
	first := -1
	end := func(i int) { // ends a stretch without a gap
		if first >= 0 {
			fmt.Fprintf(&under, "L%.1f %dL%.1f %dZ", x(all[i].at), loadBottom, x(all[first].at), loadBottom)
		}
	}
	for i, p := range all {
		do := "L"
		if i == 0 || p.at.Sub(all[i-1].at) > 6*sandbox.SampleEvery+to.Sub(from)/mostPoints {
			if i > 0 {
				end(i - 1)
			}
			do, first = "M", i
		}
		fmt.Fprintf(&b, "%s%.1f %.1f", do, x(p.at), heightOf(p.v, most))
		fmt.Fprintf(&under, "%s%.1f %.1f", do, x(p.at), heightOf(p.v, most))
	}
	if len(all) > 0 {
		end(len(all) - 1)
	}
	return b.String(), under.String()
}

// chartTime returns the time that the charts of a sandbox begin at: an hour ago, or its
// start if that is later, but not less than five minutes ago.
func chartTime(started, now time.Time) time.Time {
	from := now.Add(-time.Hour)
	if started.After(from) {
		from = started
	}
	if latest := now.Add(-5 * time.Minute); from.After(latest) {
		from = latest
	}
	return from
}

// chartsOf draws the measurements between two times.
func chartsOf(samples []sandbox.Sample, from, now time.Time) (out []chart) {
	if len(samples) == 0 {
		return nil
	}
	last := samples[len(samples)-1]
	mib := func(n int64) string { return fmt.Sprintf("%d MiB", n>>20) }
	for _, c := range []struct {
		what, side string
		limit      float64
		value      func(sandbox.Sample) float64
		text       func(float64) string
	}{
		{"CPU", "", 100, func(s sandbox.Sample) float64 { return s.CPUPercent }, func(v float64) string { return fmt.Sprintf("%.0f %%", v) }},
		{"memory", "of " + mib(last.MemoryTotal), float64(last.MemoryTotal), func(s sandbox.Sample) float64 { return float64(s.MemoryUsed) }, func(v float64) string { return mib(int64(v)) }},
		{"disk written", "of " + mib(last.DiskTotal), float64(last.DiskTotal), func(s sandbox.Sample) float64 { return float64(s.DiskUsed) }, func(v float64) string { return mib(int64(v)) }},
	} {
		var all []point
		peak, low := 0.0, c.limit
		for _, s := range samples {
			v := c.value(s)
			all, peak, low = append(all, point{s.At, v}), max(peak, v), min(low, v)
		}
		d := chart{What: c.what, Now: c.text(c.value(last)), Side: or(c.side, "peak "+c.text(peak))}
		d.Label = fmt.Sprintf("%s in the last %s: %s to %s, now %s of %s", c.what, howLong(now.Sub(from)), c.text(low), c.text(peak), d.Now, c.text(c.limit))
		d.Path, d.Area = drawn(thinned(all), from, now, c.limit)
		for _, part := range []float64{0, .5, 1} {
			text := "0"
			if part > 0 {
				text = strings.TrimSuffix(c.text(c.limit*part), " MiB")
			}
			d.Lines = append(d.Lines, gridline{fmt.Sprintf("%.1f", heightOf(part, 1)+.5), text, part == 1 && c.what != "CPU"})
		}
		for i, class := range []string{"", "mid", "mid", "end"} {
			d.Marks = append(d.Marks, chartMark{loadLeft + i*(loadRight-loadLeft)/3, class, from.Add(time.Duration(i) * now.Sub(from) / 3).UTC().Format("15:04")})
		}
		out = append(out, d)
	}
	return out
}

// sparkTime is how long before now the small chart of a list begins.
const sparkTime = 15 * time.Minute

// sparkPath draws the CPU use of sparkTime until now in a cell of a table. It has at most 60
// points; each is the highest use of its part of the time. It is empty without samples.
func sparkPath(samples []sandbox.Sample, now time.Time) string {
	const points = 60
	var use [points]float64
	var known [points]bool
	for _, s := range samples {
		if i := points - 1 - int(now.Sub(s.At)*points/sparkTime); i >= 0 && i < points {
			use[i], known[i] = max(use[i], s.CPUPercent), true
		}
	}
	var b strings.Builder
	do := "M"
	for i, v := range use {
		if known[i] {
			fmt.Fprintf(&b, "%s%.1f %.1f", do, float64(sparkWidth)*float64(i)/(points-1), sparkHeight-1-(sparkHeight-2)*min(100, max(0, v))/100)
			do = "L"
		}
	}
	return b.String()
}

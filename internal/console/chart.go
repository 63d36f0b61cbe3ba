package console

import (
	"fmt"
	"strconv"
	"time"
)

// Charts are drawn on the server as SVG with classes only: the Content-Security-Policy
// allows no style in a page, and no script is needed to read one.

// A bar is one rectangle of a chart.
type bar struct {
	Class      string // b0, b1, b2 or b3
	X, Y, W, H string
}

// A tick is a line and a number beside it.
type tick struct{ Y, TextY, Text string }

// A barChart is a chart of stacked bars by hour, 720 by 140.
type barChart struct {
	Label string // what the chart says, for those who do not see it
	Bars  []bar
	Ticks []tick
}

// The place of the bars in a bar chart.
const (
	chartLeft, chartRight = 30.0, 720.0
	chartTop, chartFoot   = 22.0, 120.0
)

// newBarChart draws one bar for each hour, with the layers stacked.
func newBarChart(label string, layers ...[]int) barChart {
	c := barChart{Label: label}
	hours, most := len(layers[0]), 0
	for h := range hours {
		n := 0
		for _, l := range layers {
			n += l[h]
		}
		most = max(most, n)
	}
	top := roundUp(most)
	for i := range 3 {
		n := top * i / 2
		y := chartFoot - (chartFoot-chartTop)*float64(n)/float64(top)
		c.Ticks = append(c.Ticks, tick{px(y + .5), px(y + 4), thousands(int64(n))})
	}
	wide := (chartRight - chartLeft) / float64(hours)
	for h := range hours {
		y := chartFoot
		for i, l := range layers {
			if l[h] == 0 {
				continue
			}
			high := max((chartFoot-chartTop)*float64(l[h])/float64(top), 1.5)
			y -= high
			c.Bars = append(c.Bars, bar{fmt.Sprintf("b%d", i), px(chartLeft + wide*float64(h) + 2), px(y), px(wide - 4), px(high)})
		}
	}
	return c
}

// roundUp returns a number of at least n that halves well: 2, 4, 10, 20, 40, 100, …
func roundUp(n int) int {
	for step := 1; ; step *= 10 {
		for _, m := range []int{2, 4, 10} {
			if m*step >= n {
				return m * step
			}
		}
	}
}

// px writes a coordinate.
func px(v float64) string { return fmt.Sprintf("%.1f", v) }

// A strip shows the number of events in each quarter of an hour, 1120 by 96.
type strip struct {
	Label string
	Bars  []bar
	Hours []tick // Y is the distance from the left
}

// newStrip draws the strip of a day.
func newStrip(events []dayEvent, day time.Time) strip {
	const quarters, high, foot = 96, 72.0, 78.0
	var n [4][quarters]int
	most, total, held, refused := 0, 0, 0, 0
	first, last := quarters, 0
	for i := range events {
		q := int(events[i].At.Sub(day) / (15 * time.Minute))
		if q < 0 || q >= quarters {
			continue
		}
		layer := events[i].layer()
		n[layer][q]++
		total++
		first, last = min(first, q), max(last, q)
		switch layer {
		case 2:
			held++
		case 3:
			refused++
		}
		most = max(most, n[0][q]+n[1][q]+n[2][q]+n[3][q])
	}
	s := strip{Label: "Nothing happened on this day."}
	if total > 0 {
		clock := func(q int) string { return fmt.Sprintf("%02d:%02d", q/4, q%4*15) }
		s.Label = fmt.Sprintf("Density of the day: %s from %s to %s; %d held, %d refused or failed", count(total, "event", "events"), clock(first), clock(last+1), held, refused)
	}
	wide := 1120.0 / quarters
	for q := range quarters {
		y := foot
		for layer := range n {
			if n[layer][q] == 0 {
				continue
			}
			h := max(high*float64(n[layer][q])/float64(most), 2)
			y -= h
			s.Bars = append(s.Bars, bar{"b" + strconv.Itoa(layer), px(wide * float64(q)), px(y), px(wide - 2.5), px(h)})
		}
	}
	for h := 0; h <= 24; h += 3 {
		t := tick{Y: px(1120 * float64(h) / 24), TextY: "mid", Text: fmt.Sprintf("%02d:00", h)}
		switch h {
		case 0:
			t.TextY = "start"
		case 24:
			t.TextY = "end"
		}
		s.Hours = append(s.Hours, t)
	}
	return s
}

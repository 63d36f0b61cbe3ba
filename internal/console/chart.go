package console

import (
	"fmt"
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
	Label string // what it says, for those who do not see it
	Bars  []bar
	Ticks []tick
}

// The place of the bars in a bar chart.
const (
	chartLeft, chartRight = 30.0, 720.0
	chartTop, chartFoot   = 22.0, 120.0
)

// newBarChart draws one bar for each hour; the layers stand on one another.
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

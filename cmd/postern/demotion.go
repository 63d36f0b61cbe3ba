package main

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"postern/internal/mailbox"
)

// errDemotion says how the flag is written.
var errDemotion = errors.New("want some of window=DURATION, bounces=N, bounced=SHARE, complaints=N, complained=SHARE and denials=N with commas between them, N from 1 and SHARE between 0 and 1; or none")

// demotion is what [mailbox.Demotion] has by itself, as its flag writes it.
const demotion = "window=24h,bounces=5,bounced=0.1,complaints=2,complained=0.003,denials=3"

// parseDemotion reads what puts an inbox that sends by itself back to
// gated_send. What is left out never does.
func parseDemotion(s string) (d mailbox.Demotion, err error) {
	d.Bounces, d.Complaints, d.Denials = -1, -1, -1
	if s == "none" {
		return d, nil
	}
	counts := map[string]*int{"bounces": &d.Bounces, "complaints": &d.Complaints, "denials": &d.Denials}
	shares := map[string]*float64{"bounced": &d.Bounced, "complained": &d.Complained}
	for part := range strings.SplitSeq(s, ",") {
		name, value, ok := strings.Cut(strings.TrimSpace(part), "=")
		switch {
		case !ok:
			err = errDemotion
		case name == "window":
			if d.Window, err = time.ParseDuration(value); err == nil && d.Window <= 0 {
				err = errDemotion
			}
		case counts[name] != nil:
			if *counts[name], err = strconv.Atoi(value); err == nil && *counts[name] < 1 {
				err = errDemotion
			}
		case shares[name] != nil:
			// Written so that it also refuses what is no number (NaN).
			if *shares[name], err = strconv.ParseFloat(value, 64); err == nil && !(*shares[name] > 0 && *shares[name] < 1) {
				err = errDemotion
			}
		default:
			err = errDemotion
		}
		if err != nil {
			return mailbox.Demotion{}, fmt.Errorf("%q: %w", part, errDemotion)
		}
	}
	return d, nil
}

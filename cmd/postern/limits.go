package main

import (
	"fmt"
	"strconv"
	"strings"

	"postern/internal/quota"
)

// What may be sent if nobody says otherwise: much more than an agent writes, and
// much less than one that is out of control could.
const (
	inboxLimits   = "minute=60,hour=1000,day=5000,recipients=10000,bytes=2147483648"
	projectLimits = "minute=600,hour=10000,day=50000,recipients=100000,bytes=21474836480"
)

// parseLimits reads limits as the flags write them.
func parseLimits(s string) (l quota.Limits, err error) {
	if s == "none" {
		return l, nil
	}
	fields := map[string]*int64{"minute": &l.PerMinute, "hour": &l.PerHour, "day": &l.PerDay, "recipients": &l.Recipients, "bytes": &l.Bytes}
	for part := range strings.SplitSeq(s, ",") {
		name, value, ok := strings.Cut(strings.TrimSpace(part), "=")
		n, err := strconv.ParseInt(value, 10, 64)
		if !ok || err != nil || n < 1 || fields[name] == nil {
			return l, fmt.Errorf("%q: want some of minute=N, hour=N, day=N, recipients=N and bytes=N with commas between them, or none", part)
		}
		*fields[name] = n
	}
	return l, nil
}

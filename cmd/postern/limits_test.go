package main

import (
	"testing"

	"postern/internal/mailbox"
)

func TestParseLimits(t *testing.T) {
	for _, tt := range []struct {
		flag string
		want mailbox.Limits
		ok   bool
	}{
		{"none", mailbox.Limits{}, true},
		{"minute=1, day=2", mailbox.Limits{PerMinute: 1, PerDay: 2}, true},
		{inboxLimits, mailbox.Limits{PerMinute: 60, PerHour: 1000, PerDay: 5000, Recipients: 10000, Bytes: 2 << 30}, true},
		{projectLimits, mailbox.Limits{PerMinute: 600, PerHour: 10000, PerDay: 50000, Recipients: 100000, Bytes: 20 << 30}, true},
		{"", mailbox.Limits{}, false},
		{"minute=0", mailbox.Limits{}, false},
		{"minute=-1", mailbox.Limits{}, false},
		{"second=1", mailbox.Limits{}, false},
		{"minute", mailbox.Limits{}, false},
	} {
		if got, err := parseLimits(tt.flag); (err == nil) != tt.ok || tt.ok && got != tt.want {
			t.Errorf("parseLimits(%q) = %+v, %v; want %+v", tt.flag, got, err, tt.want)
		}
	}
}

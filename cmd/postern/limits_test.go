package main

import (
	"testing"

	"postern/internal/quota"
)

func TestParseLimits(t *testing.T) {
	for _, tt := range []struct {
		flag string
		want quota.Limits
		ok   bool
	}{
		{"none", quota.Limits{}, true},
		{"minute=1, day=2", quota.Limits{PerMinute: 1, PerDay: 2}, true},
		{inboxLimits, quota.Limits{PerMinute: 60, PerHour: 1000, PerDay: 5000, Recipients: 10000, Bytes: 2 << 30}, true},
		{projectLimits, quota.Limits{PerMinute: 600, PerHour: 10000, PerDay: 50000, Recipients: 100000, Bytes: 20 << 30}, true},
		{"", quota.Limits{}, false},
		{"minute=0", quota.Limits{}, false},
		{"minute=-1", quota.Limits{}, false},
		{"second=1", quota.Limits{}, false},
		{"minute", quota.Limits{}, false},
	} {
		if got, err := parseLimits(tt.flag); (err == nil) != tt.ok || tt.ok && got != tt.want {
			t.Errorf("parseLimits(%q) = %+v, %v; want %+v", tt.flag, got, err, tt.want)
		}
	}
}

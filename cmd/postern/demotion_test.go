package main

import (
	"testing"
	"time"

	"postern/internal/mailbox"
)

func TestParseDemotion(t *testing.T) {
	never := mailbox.Demotion{Bounces: -1, Complaints: -1, Denials: -1}
	for _, tt := range []struct {
		flag string
		want mailbox.Demotion
		ok   bool
	}{
		{"none", never, true},
		{demotion, mailbox.Demotion{Window: 24 * time.Hour, Bounces: 5, Bounced: 0.1, Complaints: 2, Complained: 0.003, Denials: 3}, true},
		{"denials=1", mailbox.Demotion{Bounces: -1, Complaints: -1, Denials: 1}, true},
		{"bounces=2, bounced=0.5", mailbox.Demotion{Bounces: 2, Bounced: 0.5, Complaints: -1, Denials: -1}, true},
		{"", never, false},
		{"denials", never, false},
		{"denials=0", never, false},
		{"denials=-1", never, false},
		{"bounced=0", never, false},
		{"bounced=10", never, false},
		{"bounced=NaN", never, false},
		{"window=0s", never, false},
		{"window=1", never, false},
		{"rejections=3", never, false},
		{"denials=1,none", never, false},
	} {
		if got, err := parseDemotion(tt.flag); (err == nil) != tt.ok || tt.ok && got != tt.want {
			t.Errorf("parseDemotion(%q) = %+v, %v; want %+v", tt.flag, got, err, tt.want)
		}
	}
}

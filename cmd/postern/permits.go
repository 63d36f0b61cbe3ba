package main

import (
	"github.com/spf13/pflag"

	"postern/internal/permit"
)

// PermitSettings is what sandboxes can be allowed beyond the ceiling.
type PermitSettings struct {
	Permits string // "on" or "off": whether owners can open hosts to sandboxes that the ceiling does not
}

func (c *PermitSettings) flags(fs *pflag.FlagSet) {
	fs.StringVar(&c.Permits, "permits", "on", "on or off: whether code in a sandbox may propose hosts that it wants to reach, and an owner who approves that opens them for a time, also beyond --egress. See docs/reference/network.md")
}

func (c *PermitSettings) validate(bad func(flag, format string, args ...any)) {
	if c.Permits != "on" && c.Permits != "off" {
		bad("permits", "%q: want on or off", c.Permits)
	}
}

func (c *PermitSettings) permits() permit.Config { return permit.Config{Off: c.Permits == "off"} }

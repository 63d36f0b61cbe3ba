package registry

import "time"

// Hurry lets p wait almost no time between attempts.
func Hurry(p *Puller) { p.paused = time.Millisecond }

// SetECR sets the URL of Amazon ECR's API.
func SetECR(p *Puller, f func(region, suffix string, fips bool) string) { p.ecr = f }

package registry

import "time"

// Hurry lets p wait almost no time between attempts.
func Hurry(p *Puller) { p.paused = time.Millisecond }

// SetECR sets the URL of Amazon ECR's API.
func SetECR(p *Puller, f func(region, suffix string, fips bool) string) { p.ecr = f }

// SignV4 is signV4.
var SignV4 = signV4 //nolint:gochecknoglobals // for a test

// Host returns where the image that ref names is asked for with c.
func Host(ref string, c Credentials) (string, error) {
	s, err := (&Puller{}).session(ref, c)
	if err != nil {
		return "", err
	}
	return s.at.address(), nil
}

// Challenges returns how many challenges a WWW-Authenticate field holds.
func Challenges(field string) int { return len(parseChallenges([]string{field})) }

package contract

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"
)

// String returns d as contracts write it, such as "90s", "10m" or "1h30m".
func (d Duration) String() string {
	s := time.Duration(d).String()
	if strings.HasSuffix(s, "m0s") {
		s = strings.TrimSuffix(s, "0s")
	}
	if strings.HasSuffix(s, "h0m") {
		s = strings.TrimSuffix(s, "0m")
	}
	return s
}

// MarshalText returns [Duration.String].
func (d Duration) MarshalText() ([]byte, error) { return []byte(d.String()), nil }

// UnmarshalText reads a time span with a unit, such as "90s", "10m" or "1h30m".
func (d *Duration) UnmarshalText(b []byte) error {
	v, err := time.ParseDuration(string(b))
	if err != nil {
		return errors.New(`must be a time with its unit, such as "90s", "10m" or "2h"`)
	}
	*d = Duration(v)
	return nil
}

type sizeUnit struct {
	name  string
	bytes int64
}

// sizeUnits returns the units of sizes, the largest first.
func sizeUnits() [4]sizeUnit {
	return [4]sizeUnit{{"TiB", 1 << 40}, {"GiB", 1 << 30}, {"MiB", 1 << 20}, {"KiB", 1 << 10}}
}

// String returns s as contracts write it, in the largest unit that divides it.
func (s Size) String() string {
	for _, u := range sizeUnits() {
		if s != 0 && int64(s)%u.bytes == 0 {
			return strconv.FormatInt(int64(s)/u.bytes, 10) + u.name
		}
	}
	return strconv.FormatInt(int64(s), 10)
}

// MarshalText returns [Size.String].
func (s Size) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// UnmarshalText reads a number of bytes, which may have a unit: KiB, MiB, GiB or TiB.
func (s *Size) UnmarshalText(b []byte) error {
	text, factor := string(b), int64(1)
	for _, u := range sizeUnits() {
		if n, ok := strings.CutSuffix(text, u.name); ok {
			text, factor = n, u.bytes
			break
		}
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil || n < 0 || text[0] == '+' || text[0] == '-' {
		return errors.New(`must be a number of bytes, such as 1000, "512KiB", "16MiB" or "1GiB"`)
	}
	if n > (1<<62)/factor {
		return fmt.Errorf("%s is too large", b)
	}
	*s = Size(n * factor)
	return nil
}

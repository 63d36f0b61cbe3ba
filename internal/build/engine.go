package build

import (
	"context"
	"errors"
)

// finalize is the last phase of a build, as entries name it.
const finalize = "finalize"

// build runs a job and records that it is ready.
func (s *Service) build(ctx context.Context, j *job) error {
	return &stepError{step: "base", err: errors.New("builds are not implemented yet")}
}

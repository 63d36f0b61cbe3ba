package seal

import (
	"crypto/hkdf"
	"crypto/sha256"
	"fmt"
)

// UnderToken closes the secret of a credential under a key that follows from a token,
// so that whoever shows the token gives the credential, and the server alone has
// neither. Place names the row that it is stored in; [FromToken] must be given the same.
func UnderToken(token, place, secret string) ([]byte, error) {
	key, err := tokenKey(token, place)
	if err != nil {
		return nil, err
	}
	c, err := gcm(key)
	if err != nil {
		return nil, fmt.Errorf("seal credential for a token: %w", err)
	}
	return c.Seal(nil, nil, []byte(secret), nil), nil //nolint:gosec // the nonce is random: NewGCMWithRandomNonce makes and prepends it
}

// FromToken returns the secret that [UnderToken] has closed, or an error that wraps
// [ErrSealed].
func FromToken(token, place string, sealed []byte) (string, error) {
	key, err := tokenKey(token, place)
	if err != nil {
		return "", err
	}
	c, err := gcm(key)
	if err != nil {
		return "", fmt.Errorf("open credential of a token: %w", err)
	}
	b, err := c.Open(nil, nil, sealed, nil)
	if err != nil {
		return "", fmt.Errorf("open credential of a token: %w", ErrSealed)
	}
	return string(b), nil
}

func tokenKey(token, place string) ([]byte, error) {
	key, err := hkdf.Key(sha256.New, []byte(token), []byte(place), "postern token v1", 32)
	if err != nil {
		return nil, fmt.Errorf("derive key of a token: %w", err)
	}
	return key, nil
}

# /etc/profile.d/torchobs.sh: trainings of a user who has an exporter (torchobs-exporter@USER.service) are seen by it.
if [ -d "/run/torchobs/${USER:-}" ]; then
  export TORCHOBS_DIR="/run/torchobs/$USER" TORCHOBS_EXPORTER=0
fi

from django.urls import path

from . import views

urlpatterns = [
    path("pay/<int:pk>/", views.pay),
    path("touch/<int:pk>/", views.touch),
    path("apay/<int:pk>/", views.apay),
    path("busy-inside/", views.busy_inside),
    path("abusy-inside/", views.abusy_inside),
    path("stream/<int:pk>/", views.stream),
    path("astream/<int:pk>/", views.astream),
    path("file/<int:pk>/", views.file),
]
